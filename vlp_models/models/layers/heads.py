"""Prediction heads. Gather the positions that need a prediction first, then call the head on those.

Shape suffixes: D hidden, V classes or vocabulary; leading dimensions are free.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenHead(nn.Module):
    """Linear, GELU, LayerNorm, then a linear layer onto the vocabulary (BERT's LM head) or onto classes."""

    def __init__(self, hidden: int, outputs: int, *, eps: float, tied: bool = False) -> None:
        """`tied`: the last matrix is the caller's (the word embeddings), passed on every call."""
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.weight = None if tied else nn.Parameter(torch.empty(outputs, hidden))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_D: Tensor, tied_weight_VD: Tensor | None = None) -> Tensor:
        weight = self.weight if tied_weight_VD is None else tied_weight_VD
        assert weight is not None, "a tied head is called with the weight it is tied to"
        return F.linear(self.norm(F.gelu(self.dense(x_D))), weight, self.bias)
