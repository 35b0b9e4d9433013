"""Multi-head attention (self, cross, one token at a time) and its masks.

One matrix holds the query, key and value projections, in this order, so self-attention is a single product, and a model
that shares the weights of self- and cross-attention (XGPT) needs nothing else. Weights are used only by calling the
module that owns them, so a module may be replaced by one with an adapter (LoRA) or with quantized weights.

Masks are bool, True where a query may attend, broadcastable to [B, H, Q, K].

Shape suffixes: B batch, Q queries, K keys, D hidden, H heads, E head dimension, T tokens, M packed tokens,
N hypotheses or sequences, L places of a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.linear import PackedLinear, project_part
from vlp_models.models.layers.packing import Packing


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with biases (Vaswani et al. 2017, section 3.2.2).

    Tokens are padded, [B, Q, D], or packed, [M, D], with their `Packing`. A float mask is added to the scores. Every
    query needs at least one key that it may attend to.
    """

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = PackedLinear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Self-attention: [B, Q, D] or [M, D], as `x`."""
        # (B, Q, D) or (M, D) -> (B, Q, 3 D) -> three of (B, H, Q, E): scores need padded sequences, the rest does not.
        projected = self.qkv(x)
        if packing is not None:
            projected = packing.pad(projected, self)
        query, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        y_BQD = self._attend(query, KeyValues(keys, values), mask)
        return self.out(y_BQD if packing is None else packing.pack(y_BQD))

    def cross(self, x: Tensor, memory: KeyValues, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Attention over the projected `memory` of B images.

        packing: of the rows of all texts of an image side by side (`Packing.by_owner`), so no image's memory is copied.
        """
        # With packing, (M, D) -> (B, Q, D): the queries of an image's texts side by side.
        query = project_part(self.qkv, x, slice(x.shape[-1]))
        if packing is not None:
            query = packing.pad(query)
        y_BQD = self._attend(self._split(query), memory, mask)
        return self.out(y_BQD if packing is None else packing.pack(y_BQD))

    def step(self, x_ND: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Causal self-attention of one new token over `past` and itself. Returns the extended past as well."""
        # (N, D) -> (N, 1, 3 D) -> three of (N, H, 1, E)
        query, keys, values = (self._split(part) for part in self.qkv(x_ND)[:, None].chunk(3, dim=-1))
        present = KeyValues(keys, values)
        if past is not None:
            present = past.append(present)
        return self.out(self._attend(query, present, None)[:, 0]), present

    def project(self, context: Tensor, packing: Packing | None = None) -> KeyValues:
        """Return the keys and values of `context`, for `cross`."""
        # (B, K, D) or (M, D) -> (B, K, 2 D) -> two of (B, H, K, E)
        both = project_part(self.qkv, context, slice(context.shape[-1], None))
        if packing is not None:
            both = packing.pad(both)
        keys, values = (self._split(part) for part in both.chunk(2, dim=-1))
        return KeyValues(keys, values)

    def _split(self, x_BQD: Tensor) -> Tensor:
        """[B, Q, D] -> [B, H, Q, E]"""
        return x_BQD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _attend(self, query_BHQE: Tensor, memory: KeyValues, mask: Tensor | None) -> Tensor:
        """Return the heads' outputs side by side, [B, Q, D], before the projection `out`."""
        dropout = self.dropout if self.training else 0.0
        x = scaled_dot_product(query_BHQE, memory.keys, memory.values, mask, dropout)
        return x.transpose(1, 2).flatten(2)  # (B, H, Q, E) -> (B, Q, D)


def scaled_dot_product(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Return attention's output, [B, H, Q, E].

    In mixed precision on a CPU it is computed in float32: torch's CPU kernel takes up to three times as long for
    bfloat16, and the matrix products around it gain less than that.
    """
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            query, keys, values = query.float(), keys.float(), values.float()
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout)


def padding_mask(mask_BT: Tensor) -> Tensor:
    """Return the mask with which every query attends to every real token. [B, 1, 1, T]"""
    return mask_BT[:, None, None, :]


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the mask with which every query attends to itself and the tokens before it. [1, 1, T, T]

    Padding needs no mask: it comes last, where no real token attends."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def prefix_mask(mask_NL: Tensor, prefix: int, causal_N: Tensor | None = None) -> Tensor:
    """Return the mask of sequences that start with `prefix` places to which every query attends.

    After the prefix, all places attend to each other, or, in causal sequences, to earlier ones and themselves. Built on
    the arguments' device.

    mask_NL bool: the real tokens. causal_N bool: the causal sequences; None: none. [N, 1, 1, L] or [N, 1, L, L]
    """
    if causal_N is None:
        return padding_mask(mask_NL)
    places_L = torch.arange(mask_NL.shape[1], device=mask_NL.device)
    before_LL = (places_L < prefix) | (places_L <= places_L[:, None])  # one row per query
    return ((before_LL | ~causal_N[:, None, None]) & mask_NL[:, None])[:, None]
