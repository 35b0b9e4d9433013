"""Attention on attention: regions in the light of each other, before the encoder (appendix A.1).

L. Huang et al.: "Attention on Attention for Image Captioning", ICCV 2019, section 3.

    Q, K, V = Wq x, Wk x, Wv x;  f = multi-head attention of them, without a projection behind it
    AoA = sigmoid(W1 Q + W2 f + b1) * (W3 Q + W4 f + b2);  x' = LayerNorm(x + AoA)

The public code of AoANet gates with x itself (`gate: raw`), and normalises before (`norm: pre`), six layers of it.

Shape suffixes: M packed regions, D hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.models.layers.attention import scaled_dot_product
from vlp_models.models.layers.blocks import OwnBlock
from vlp_models.models.layers.masks import padding_mask
from vlp_models.models.layers.packing import Packing


class AttentionOnAttention(OwnBlock):
    """One layer of it."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        gate: Literal["projected", "raw"],
        norm: Literal["post", "pre"],
        dropout: float,
        attention_dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.gate_query, self.norm_place = gate, norm
        self.heads, self.attention_dropout = heads, attention_dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.gate = nn.Linear(2 * hidden, 2 * hidden)  # [W4 W3; W2 W1] on [f, Q]
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x_MD: Tensor, packing: Packing) -> Tensor:
        if self.norm_place == "pre":
            return x_MD + self.dropout(self.attend(self.norm(x_MD), packing))
        return self.norm(x_MD + self.dropout(self.attend(x_MD, packing)))

    def attend(self, x_MD: Tensor, packing: Packing) -> Tensor:
        """AoA, [M, D]."""
        projected_MD3 = self.qkv(x_MD)
        query_MD = projected_MD3[:, : x_MD.shape[1]] if self.gate_query == "projected" else x_MD
        query, keys, values = packing.pad(projected_MD3).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        found = scaled_dot_product(query, keys, values, padding_mask(packing.mask_BT), dropout)
        found_MD = packing.pack(found.transpose(1, 2).flatten(2))
        return F.glu(self.gate(torch.cat([found_MD, query_MD], -1)), -1)  # the first half times sigmoid of the second
