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
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Regions
from vlp_models.models.layers.attention import MultiHeadAttention, padding_mask, scaled_dot_product
from vlp_models.models.layers.blocks import FeedForward, MultiEntryBlock, FamilyBlock, Residual
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.embeddings import FeatureDropout
from vlp_models.models.layers.packing import Packing
from vlp_models.models.xgpt.state import Memory

OWN, ENCODED = 0, 1  # rows of the signal: of the layer's own past, and of what was encoded


class Block(MultiEntryBlock):
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


class TextEmbedding(nn.Module):
    """Token + learned absolute position -> LayerNorm -> dropout."""

    def __init__(self, vocab_size: int, hidden: int, *, max_positions: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_positions, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """int64 both, of one shape: packed, or one token of each hypothesis."""
        return self.place(self.words(ids), positions)

    def place(self, content: Tensor, positions: Tensor) -> Tensor:
        """The same with other content than words."""
        return self.dropout(self.norm(content + self.positions(positions)))


class RegionEmbedding(nn.Module):
    """Linear over a region's feature and its location side by side -> LayerNorm.

    A location is x1, y1, x2, y2 as fractions of the image and the area they enclose. separate_norms: what becomes of
    the two is normalised before it is added, the location counted from -1 to 1. feature_dropout: see `FeatureDropout`.
    """

    def __init__(
        self, feature_dim: int, hidden: int, *, eps: float, separate_norms: bool, feature_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.features = nn.Linear(feature_dim, hidden)  # with `locations` the one matrix of [feature, location]
        self.locations = nn.Linear(5, hidden, bias=separate_norms)
        self.feature_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.location_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, regions: Regions, *, drop: bool = True) -> tuple[Tensor, Packing]:
        """The packed regions, [M, D], and where they stand in [B, R]; no dropout but that of features, and not that
        unless `drop`. An image without regions has one that is all zero: attention needs something to look at."""
        mask_BR = regions.mask_BR.clone()
        mask_BR[:, 0] |= ~mask_BR.any(1)
        packing = Packing.of(mask_BR)
        seen_BR1 = regions.mask_BR[..., None]
        boxes_M4 = packing.pack(regions.boxes_BR4 * seen_BR1)
        x1, y1, x2, y2 = boxes_M4.unbind(-1)
        locations_M5 = torch.cat([boxes_M4, ((x2 - x1) * (y2 - y1))[:, None]], dim=-1)
        features_BRF = self.feature_dropout(regions.features_BRF) if drop else regions.features_BRF
        features_MD = self.features(packing.pack(features_BRF * seen_BR1))
        if self.feature_norm is None or self.location_norm is None:
            return self.norm(features_MD + self.locations(locations_M5)), packing
        locations_MD = self.location_norm(self.locations(2 * locations_M5 - 1))
        return self.norm(self.feature_norm(features_MD) + locations_MD), packing


class Matching(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, hidden))  # w2, w3

    def forward(self, words_MD: Tensor, words: Packing, regions_KD: Tensor, regions: Packing) -> Tensor:
        """What each word found in its image, [M, D]; text i belongs to image i. Softmax in float32 at least."""
        own_D, both_D = self.weight
        regions_NRD = regions.pad(regions_KD)
        scores_NTR = words.pad(words_MD * both_D) @ regions_NRD.mT + (regions_NRD @ own_D)[:, None]
        scores_NTR = scores_NTR.float() if scores_NTR.dtype.itemsize < 4 else scores_NTR
        shares_NTR = scores_NTR.masked_fill(~regions.mask_BT[:, None], float("-inf")).softmax(-1)
        return words.pack(shares_NTR.to(regions_NRD.dtype) @ regions_NRD)


class AttentionOnAttention(FamilyBlock):
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
