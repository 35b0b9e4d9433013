"""Multi-head attention: self, cross and one token at a time.

One matrix holds the query, key and value projections, in this order, so that self-attention is one product and a
model that shares the weights of self- and cross-attention (XGPT) needs nothing more.

Shape suffixes: B batch, Q queries, K keys, D hidden, H heads, E head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from vlp_models.models.layers.reading import Reading


class KeyValues(NamedTuple):
    """Projected keys and values, [B, H, K, E] each: what decoding keeps instead of hidden states."""

    keys: Tensor
    values: Tensor

    def append(self, other: KeyValues) -> KeyValues:
        return KeyValues(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))

    def select(self, index_N: Tensor) -> KeyValues:
        return KeyValues(self.keys.index_select(0, index_N), self.values.index_select(0, index_N))


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with biases (Vaswani et al. 2017, section 3.2.2).

    A mask is bool, True where a query may attend, and broadcasts to [B, H, Q, K]; a float mask is added to the
    scores. Every query needs at least one key it may attend to.
    """

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BQD: Tensor, mask: Tensor | None = None, reading: Reading | None = None) -> Tensor:
        """Self-attention; with a causal `reading`, of the tokens that it has."""
        query, keys, values = self.qkv(x_BQD).chunk(3, dim=-1)
        if reading is not None:
            query, (keys, values) = reading.padded(query), reading.keys_values(self, keys, values)
        y_BQD = self._attend(query, KeyValues(self._split(keys), self._split(values)), mask)
        return self.out(y_BQD if reading is None else reading.select(y_BQD))

    def cross(
        self, x_NQD: Tensor, memory: KeyValues, mask: Tensor | None = None, reading: Reading | None = None
    ) -> Tensor:
        """Attention over projected `memory`, perhaps of fewer images than there are rows: those of one image lie
        together and become its queries, so that nothing is copied. `reading` as in `forward`."""
        hidden = x_NQD.shape[-1]
        query_NQD = F.linear(x_NQD, self.qkv.weight[:hidden], self.qkv.bias[:hidden])
        if reading is not None:
            query_NQD = reading.padded(query_NQD)
        images, (rows, length, _) = len(memory.keys), query_NQD.shape
        query_BKD = query_NQD.reshape(images, rows // max(1, images) * length, hidden)  # a batch may have no rows
        y_NQD = self._attend(query_BKD, memory, mask).reshape(query_NQD.shape)
        return self.out(y_NQD if reading is None else reading.select(y_NQD))

    def step(self, x_N1D: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Causal self-attention of one new token over itself and the `past` ones; returns the grown past, too."""
        query, keys, values = self.qkv(x_N1D).chunk(3, dim=-1)
        present = KeyValues(self._split(keys), self._split(values))
        if past is not None:
            present = past.append(present)
        return self.out(self._attend(query, present, None)), present

    def project(self, context_BKD: Tensor) -> KeyValues:
        """The keys and values of `context`, for `cross`."""
        hidden = context_BKD.shape[-1]
        both = F.linear(context_BKD, self.qkv.weight[hidden:], self.qkv.bias[hidden:])
        keys, values = (self._split(part) for part in both.chunk(2, dim=-1))
        return KeyValues(keys, values)

    def _split(self, x_BQD: Tensor) -> Tensor:
        return x_BQD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _attend(self, query_BQD: Tensor, memory: KeyValues, mask: Tensor | None) -> Tensor:
        """What the heads found, side by side: `out` is still to come."""
        dropout = self.dropout if self.training else 0.0
        query = self._split(query_BQD)
        x = F.scaled_dot_product_attention(query, memory.keys, memory.values, attn_mask=mask, dropout_p=dropout)
        return x.transpose(1, 2).flatten(2)
