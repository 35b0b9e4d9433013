"""Prediction heads and attention pooling.

Shape suffixes: B batch, M packed tokens, D hidden, V classes or vocabulary, P pooled dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.models.layers.packing import Packing


class TokenHead(nn.Module):
    """Linear, GELU, LayerNorm, then a linear layer onto the vocabulary (BERT's LM head) or onto classes.

    Gather the positions that need a prediction first, then call the head on those.
    """

    def __init__(self, hidden: int, outputs: int, *, eps: float, tied: bool = False) -> None:
        """tied: the last matrix is the caller's (the word embeddings), passed with every call."""
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.weight = None if tied else nn.Parameter(torch.empty(outputs, hidden))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_D: Tensor, tied_weight_VD: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., V]"""
        weight = self.weight if tied_weight_VD is None else tied_weight_VD
        assert weight is not None, "a tied head is called with the weight it is tied to"
        return F.linear(self.norm(F.gelu(self.dense(x_D))), weight, self.bias)


class AttentionPooler(nn.Module):
    """A two-layer MLP scores the tokens; a linear layer projects their weighted mean (Yu et al. 2019, section 3.3).

    `batch_norm` normalizes the result over the batch, which needs at least two samples in training mode.
    """

    def __init__(self, hidden: int, outputs: int, *, dropout: float, batch_norm: bool = False) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.project = nn.Linear(hidden, outputs)
        self.norm = nn.BatchNorm1d(outputs) if batch_norm else nn.Identity()

    def forward(self, x_MD: Tensor, packing: Packing) -> Tensor:
        """[M, D] -> [B, P]. A sequence without a token gives NaN, which training and ranking refuse."""
        # (M, D) -> (B, T) weights of the tokens, then their mean: (B, 1, T) @ (B, T, D) -> (B, D)
        scores_BT = packing.pad(self.score(x_MD).squeeze(-1))
        scores_BT = scores_BT.float() if scores_BT.dtype.itemsize < 4 else scores_BT  # softmax in float32 at least
        weights_BT = scores_BT.masked_fill(~packing.mask_BT, float("-inf")).softmax(-1).to(x_MD.dtype)
        mean_BD = (weights_BT[:, None] @ packing.pad(x_MD)).squeeze(1)
        return self.norm(self.project(mean_BD))
