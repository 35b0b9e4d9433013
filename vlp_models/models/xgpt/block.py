"""A layer that encodes, decodes, or does both with the same weights (section 4.2).

Post-LN, GELU, after Vaswani et al. 2017. In the decoder, attention over the past words and attention over what was
encoded may share their weights: all that differs is whose keys and values are handed in, and those of the encoder are
projected once and used again at every step. This is how the paper's "signal in the attention network ... for efficient
re-use" is read here. `signal` adds a learned vector to what tells the two apart besides:

- `kv`, to the states behind keys and values. With two attentions in a row, it moves all scores of a query alike, which
  the softmax takes away: nothing is left of it but a constant in the values. In a merged attention it does its work.
- `query`, to the states that attend.

Shape suffixes: N texts or hypotheses, T tokens, R places of the memory, M packed tokens, D hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import KeyValues, MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward, ManyWayBlock, Residual
from vlp_models.models.layers.packing import Packing
from vlp_models.models.xgpt.state import Memory

OWN, ENCODED = 0, 1  # rows of the signal: of the layer's own past, and of what was encoded


class Block(ManyWayBlock):
    """
    Args:
        attends: how it decodes (`XGPTConfig.cross_attention`); None: it only encodes.
        own_norm: attention over the memory has a LayerNorm of its own.
    """

    signal: Tensor | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        intermediate: int,
        *,
        attends: Literal["shared_sequential", "shared_merged", "separate"] | None,
        signal: Literal["none", "kv", "query"],
        own_norm: bool,
        dropout: float,
        attention_dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.merged = attends == "shared_merged"
        self.signal_on = signal if attends else "none"
        self.attention = MultiHeadAttention(hidden, heads, attention_dropout)
        self.attention_end = Residual(hidden, dropout, eps)
        self.cross = MultiHeadAttention(hidden, heads, attention_dropout) if attends == "separate" else None
        two_ends = attends is not None and not self.merged and own_norm
        self.cross_end = Residual(hidden, dropout, eps) if two_ends else None
        self.ffn = FeedForward(hidden, intermediate)
        self.ffn_end = Residual(hidden, dropout, eps)
        self.signal = nn.Parameter(torch.zeros(2, hidden)) if self.signal_on != "none" else None

    def encode(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> Tensor:
        """Self-attention, then the feed-forward net: a layer of the encoder."""
        x_MD = self.attention_end(x_MD, self.attention(x_MD, mask, packing))
        return self.ffn_end(x_MD, self.ffn(x_MD))

    def project(self, encoded_MD: Tensor, packing: Packing) -> KeyValues:
        """The keys and values of what was encoded, for `decode` and `step`."""
        return (self.cross or self.attention).project(self._told(encoded_MD, "kv", ENCODED), packing)

    def decode(self, x_MD: Tensor, causal: Tensor, packing: Packing, keys: KeyValues, memory: Memory) -> Tensor:
        """A layer of the decoder. causal: which token sees which; keys: this layer's part of `memory`."""
        own = self.attention.project(self._told(x_MD, "kv", OWN), packing)
        if self.merged:
            seen = memory.of_texts(memory.mask).expand(-1, -1, causal.shape[2], -1)
            mask = torch.cat([seen, causal.expand(len(seen), -1, -1, -1)], -1)
            both = memory.of_texts(keys).append(own)
            x_MD = self.attention_end(x_MD, self.attention.cross(x_MD, both, mask, packing))
        else:
            found_MD = self.attention.cross(self._told(x_MD, "query", OWN), own, causal, packing)
            x_MD = self.attention_end(x_MD, found_MD)
            x_MD = self._look_at(x_MD, keys, memory.mask, packing.by_owner(memory.owner_N, memory.images))
        return self.ffn_end(x_MD, self.ffn(x_MD))

    def step(
        self, x_ND: Tensor, past: KeyValues | None, keys: KeyValues, memory: Memory, by_image: Packing
    ) -> tuple[Tensor, KeyValues]:
        """One more token of each hypothesis; `memory.owner_N` says of which image. Returns the grown past, too."""
        present = self.attention.project(self._told(x_ND, "kv", OWN)[:, None])
        present = present if past is None else past.append(present)
        if self.merged:
            seen = memory.of_texts(memory.mask)
            mask = torch.cat([seen, seen.new_ones(len(x_ND), 1, 1, present.keys.shape[2])], -1)
            found_ND = self.attention.cross(x_ND[:, None], memory.of_texts(keys).append(present), mask)[:, 0]
            x_ND = self.attention_end(x_ND, found_ND)
        else:
            found_ND = self.attention.cross(self._told(x_ND, "query", OWN)[:, None], present)[:, 0]
            x_ND = self.attention_end(x_ND, found_ND)
            x_ND = self._look_at(x_ND, keys, memory.mask, by_image)
        return self.ffn_end(x_ND, self.ffn(x_ND)), present

    def _look_at(self, x: Tensor, keys: KeyValues, mask: Tensor, by_image: Packing) -> Tensor:
        """Attention over the memory; no image's is copied."""
        attention, end = self.cross or self.attention, self.cross_end or self.attention_end
        return end(x, attention.cross(self._told(x, "query", ENCODED), keys, mask, by_image))

    def _told(self, x: Tensor, place: Literal["kv", "query"], row: int) -> Tensor:
        """With the signal, if it is one of this place."""
        return x if self.signal is None or self.signal_on != place else x + self.signal[row]
