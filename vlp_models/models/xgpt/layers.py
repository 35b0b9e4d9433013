"""XGPT's layers: embeddings, attention on attention, image-text matching, and the block that encodes and decodes.

A block encodes, decodes, or does both with the same weights (section 4.2). Post-LN, GELU, after Vaswani et al. 2017.
In the decoder, attention over past words and attention over what was encoded may share weights: only the keys and
values differ, and those of the encoder are projected once and reused at every step. This is how the paper's "signal in
the attention network ... for efficient re-use" is read here. `signal` also adds a learned vector that distinguishes the
two:

- `kv`, to the states that keys and values are projected from. With two attentions in a row it shifts all scores of a
  query equally, which the softmax removes: only a constant in the values is left. In a merged attention it matters.
- `query`, to the states that queries are projected from.

Shape suffixes: B images, N texts or hypotheses, T tokens, R regions or places of the memory, M packed words,
K packed regions, D hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Regions
from vlp_models.models.layers.attention import MultiHeadAttention, padding_mask, scaled_dot_product
from vlp_models.models.layers.blocks import FamilyBlock, FeedForward, Residual
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.embeddings import FeatureDropout
from vlp_models.models.layers.packing import Packing
from vlp_models.models.xgpt.config import XGPTConfig
from vlp_models.models.xgpt.state import Memory

DECODED, ENCODED = 0, 1  # rows of the signal: the decoder's own tokens, and what was encoded


# ---- Words and regions (section 3) ----------------------------------------------------------------------------------


class TextEmbedding(nn.Module):
    """Token + learned absolute position -> LayerNorm -> dropout."""

    def __init__(self, vocab_size: int, hidden: int, *, max_positions: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_positions, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed int64 ids at int64 positions of the same shape: packed, or one token per hypothesis."""
        return self.add_positions(self.words(ids), positions)

    def add_positions(self, content: Tensor, positions: Tensor) -> Tensor:
        """Embed other content than words."""
        return self.dropout(self.norm(content + self.positions(positions)))


class RegionEmbedding(nn.Module):
    """Linear over a region's feature and location side by side -> LayerNorm.

    A location is x1, y1, x2, y2 as fractions of the image, and the area they enclose. separate_norms: both parts are
    normalized before they are added, the location scaled to -1 .. 1. feature_dropout: see `FeatureDropout`.
    """

    def __init__(
        self, feature_dim: int, hidden: int, *, eps: float, separate_norms: bool, feature_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.features = nn.Linear(feature_dim, hidden)  # with `locations`: the matrix of [feature, location]
        self.locations = nn.Linear(5, hidden, bias=separate_norms)
        self.feature_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.location_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, regions: Regions, *, drop: bool = True) -> tuple[Tensor, Packing]:
        """Return the packed regions, [K, D], and their packing in [B, R].

        The only dropout is that of features, if `drop`. An image without regions gets one that is all zero, because
        attention needs a key.
        """
        # (B, R, F) -> (K, F): the real regions, and the first place of an image without any.
        mask_BR = regions.mask_BR.clone()
        mask_BR[:, 0] |= ~mask_BR.any(1)
        packing = Packing.of(mask_BR)
        real_BR1 = regions.mask_BR[..., None]
        boxes_K4 = packing.pack(regions.boxes_BR4 * real_BR1)
        x1, y1, x2, y2 = boxes_K4.unbind(-1)
        locations_K5 = torch.cat([boxes_K4, ((x2 - x1) * (y2 - y1))[:, None]], dim=-1)
        features_BRF = self.feature_dropout(regions.features_BRF) if drop else regions.features_BRF
        features_KD = self.features(packing.pack(features_BRF * real_BR1))
        if self.feature_norm is None or self.location_norm is None:
            return self.norm(features_KD + self.locations(locations_K5)), packing
        # Scaled to -1 .. 1: a norm removes a vector's length, in which places as fractions mostly differ.
        locations_KD = self.location_norm(self.locations(2 * locations_K5 - 1))
        return self.norm(self.feature_norm(features_KD) + locations_KD), packing


class AttentionOnAttention(FamilyBlock):
    """Refines regions by each other, before the encoder (appendix A.1).

    L. Huang et al.: "Attention on Attention for Image Captioning", ICCV 2019, section 3.

        Q, K, V = Wq x, Wk x, Wv x;  f = multi-head attention of them, without an output projection
        AoA = sigmoid(W1 Q + W2 f + b1) * (W3 Q + W4 f + b2);  x' = LayerNorm(x + AoA)

    The code of AoANet gates with x itself (`gate: raw`) and normalizes before the layer (`norm: pre`); it has six.
    """

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

    def forward(self, x_KD: Tensor, packing: Packing) -> Tensor:
        if self.norm_place == "pre":
            return x_KD + self.dropout(self.attend(self.norm(x_KD), packing))
        return self.norm(x_KD + self.dropout(self.attend(x_KD, packing)))

    def attend(self, x_KD: Tensor, packing: Packing) -> Tensor:
        """Return AoA, [K, D]."""
        projected_KD3 = self.qkv(x_KD)
        query_KD = projected_KD3[:, : x_KD.shape[1]] if self.gate_query == "projected" else x_KD
        # [K, 3 * D] -> [B, R, 3, H, E] -> three of [B, H, R, E], with H heads of E = D / H dimensions
        query, keys, values = packing.pad(projected_KD3).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        attended = scaled_dot_product(query, keys, values, padding_mask(packing.mask_BT), dropout)
        attended_KD = packing.pack(attended.transpose(1, 2).flatten(2))
        # glu: the first half times the sigmoid of the second
        return F.glu(self.gate(torch.cat([attended_KD, query_KD], -1)), -1)


class Matching(nn.Module):
    """Attention-driven image-text matching: the part of the image that each word is about (section 4.3, IDA).

        A_ij = W [x_i^T, x_j^I, x_i^T o x_j^I]      of word i and region j; W: 3h -> 1 (the trilinear score of BiDAF)
        x_i^T <- sum_j softmax_j(A_ij) x_j^I

    The first third of W adds the same to all scores of a word, which the softmax removes: it has no effect and no
    gradient, and is left out. The rest is X_T diag(w3) X_I' + 1 (X_I w2)', which needs no words x regions x h tensor.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, hidden))  # w2, w3

    def forward(self, words_MD: Tensor, words: Packing, regions_KD: Tensor, regions: Packing) -> Tensor:
        """Return the weighted regions of each word, [M, D]; text i belongs to image i. Softmax in float32 at least."""
        # Scores [N, T, R] = (X_T diag(w3)) X_I' + (X_I w2)'
        region_weight_D, product_weight_D = self.weight
        regions_NRD = regions.pad(regions_KD)
        scores_NTR = words.pad(words_MD * product_weight_D) @ regions_NRD.mT + (regions_NRD @ region_weight_D)[:, None]
        scores_NTR = scores_NTR.float() if scores_NTR.dtype.itemsize < 4 else scores_NTR
        shares_NTR = scores_NTR.masked_fill(~regions.mask_BT[:, None], float("-inf")).softmax(-1)
        return words.pack(shares_NTR.to(regions_NRD.dtype) @ regions_NRD)


# ---- Encoder and decoder (section 4.2) ------------------------------------------------------------------------------


class Block(FamilyBlock):
    """A layer of the encoder, of the decoder, or of both.

    Attention over the memory may share the weights of self-attention (`XGPTConfig.attends`), and its LayerNorm
    (`cross_norm`).
    """

    passes = ("encode", "decode")
    signal: Tensor | None

    def __init__(self, config: XGPTConfig, *, decodes: bool) -> None:
        """decodes: whether the layer is part of the decoder."""
        super().__init__()
        hidden, dropout, eps = config.hidden, config.dropout, config.layer_norm_eps
        # Only a decoder layer attends to a memory: with its own weights, or with those of self-attention.
        attends = config.attends if decodes else None
        self.merged = attends == "shared_merged"
        self.signal_place = config.signal if attends else "none"
        self.attention = MultiHeadAttention(hidden, config.heads, config.attention_dropout)
        self.attention_end = Residual(hidden, dropout, eps)
        separate = attends == "separate"
        self.cross = MultiHeadAttention(hidden, config.heads, config.attention_dropout) if separate else None
        two_norms = attends is not None and not self.merged and config.cross_norm == "own"
        self.cross_end = Residual(hidden, dropout, eps) if two_norms else None
        self.ffn = FeedForward(hidden, config.intermediate)
        self.ffn_end = Residual(hidden, dropout, eps)
        self.signal = nn.Parameter(torch.zeros(2, hidden)) if self.signal_place != "none" else None

    def encode(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> Tensor:
        """Run self-attention, then the feed-forward net: a layer of the encoder."""
        x_MD = self.attention_end(x_MD, self.attention(x_MD, mask, packing))
        return self.ffn_end(x_MD, self.ffn(x_MD))

    def project(self, encoded_MD: Tensor, packing: Packing) -> KeyValues:
        """Return the keys and values of the encoded sequence, for `decode` and `step`."""
        return (self.cross or self.attention).project(self._add_signal(encoded_MD, "kv", ENCODED), packing)

    def decode(self, x_MD: Tensor, causal: Tensor, packing: Packing, keys: KeyValues, memory: Memory) -> Tensor:
        """Run a layer of the decoder. causal: the self-attention mask; keys: this layer's part of `memory`."""
        # Keys and values of the words; queries are projected where they are used, perhaps with another signal.
        past = self.attention.project(self._add_signal(x_MD, "kv", DECODED), packing)
        if self.merged:
            # One softmax over the memory and the past: [N, 1, T, R + T]
            memory_mask = memory.of_texts(memory.mask).expand(-1, -1, causal.shape[2], -1)
            mask = torch.cat([memory_mask, causal.expand(len(memory_mask), -1, -1, -1)], -1)
            both = memory.of_texts(keys).append(past)
            x_MD = self.attention_end(x_MD, self.attention.cross(x_MD, both, mask, packing))
        else:
            attended_MD = self.attention.cross(self._add_signal(x_MD, "query", DECODED), past, causal, packing)
            x_MD = self.attention_end(x_MD, attended_MD)
            x_MD = self._attend_memory(x_MD, keys, memory.mask, packing.by_owner(memory.owner_N, memory.images))
        return self.ffn_end(x_MD, self.ffn(x_MD))

    def step(
        self, x_ND: Tensor, past: KeyValues | None, keys: KeyValues, memory: Memory, by_image: Packing
    ) -> tuple[Tensor, KeyValues]:
        """Process one more token of each hypothesis; `memory.owner_N` is its image. Returns the extended past, too."""
        present = self.attention.project(self._add_signal(x_ND, "kv", DECODED)[:, None])
        present = present if past is None else past.append(present)
        if self.merged:
            # One softmax over the memory and all tokens so far: [N, 1, 1, R + T]
            memory_mask = memory.of_texts(memory.mask)
            mask = torch.cat([memory_mask, memory_mask.new_ones(len(x_ND), 1, 1, present.keys.shape[2])], -1)
            attended_ND = self.attention.cross(x_ND[:, None], memory.of_texts(keys).append(present), mask)[:, 0]
            x_ND = self.attention_end(x_ND, attended_ND)
        else:
            attended_ND = self.attention.cross(self._add_signal(x_ND, "query", DECODED)[:, None], present)[:, 0]
            x_ND = self.attention_end(x_ND, attended_ND)
            x_ND = self._attend_memory(x_ND, keys, memory.mask, by_image)
        return self.ffn_end(x_ND, self.ffn(x_ND)), present

    def _attend_memory(self, x: Tensor, keys: KeyValues, mask: Tensor, by_image: Packing) -> Tensor:
        """Attention over the memory, without copying an image's."""
        attention, end = self.cross or self.attention, self.cross_end or self.attention_end
        return end(x, attention.cross(self._add_signal(x, "query", ENCODED), keys, mask, by_image))

    def _add_signal(self, x: Tensor, role: Literal["kv", "query"], row: int) -> Tensor:
        """Add the signal if it belongs to the states in this role."""
        if self.signal is None or self.signal_place != role:
            return x
        return x + self.signal[row]
