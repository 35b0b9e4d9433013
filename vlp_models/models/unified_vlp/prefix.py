"""A stack whose sequences start with a prefix that attends to itself only: an image before its descriptions.

The prefix can be computed once, and what follows attends to its keys and values: all texts of an image if captioning
trains on every word, and all hypotheses in decoding, which never copy it. Pretraining computes it with each text.

Shape suffixes: B prefixes (images), P their places ([CLS], the regions, [SEP]), N sequences that continue them, W the
most sequences of one prefix, Q new tokens, D hidden, H heads, E head dimension, M packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import TransformerBlock
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The keys and values of each layer, once per image. mask_BP bool: the real places."""

    layers: tuple[KeyValues, ...]
    mask_BP: Tensor

    @property
    def images(self) -> int:
        return self.mask_BP.shape[0]


class PrefixAttention(MultiHeadAttention):
    """Multi-head attention that can return its keys and values, and continue after those of a prefix."""

    def encode_prefix(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> tuple[Tensor, KeyValues]:
        """Self-attention. Returns the keys and values as well, [B, H, P, E] each."""
        query, keys_values = self._project(packing.pad(self.qkv(x_MD)))
        return self.out(packing.pack(self._attend(query, keys_values, mask))), keys_values

    def after_prefix(self, x_MD: Tensor, mask: Tensor, packing: Packing, prefix: KeyValues) -> Tensor:
        """Self-attention of sequences after their prefixes, one prefix per sequence. mask: [N, 1, Q, P + Q]."""
        query, keys_values = self._project(packing.pad(self.qkv(x_MD)))
        return self.out(packing.pack(self._attend(query, prefix.append(keys_values), mask)))

    def step_after_prefix(
        self, x_NQD: Tensor, past: KeyValues | None, prefix: KeyValues, prefix_mask: Tensor, by_prefix: Packing
    ) -> tuple[Tensor, KeyValues]:
        """Causal self-attention of Q new tokens of N sequences. Returns the extended past as well.

        A softmax over two sets of keys is the mean of the softmaxes over each set, weighted by the sums of their
        exponentials. So the prefix's keys are used where they are, without a copy per sequence.

        prefix_mask: [B, 1, 1, P]. by_prefix: one row per sequence, those of a prefix side by side.
        """
        dropout = self.dropout if self.training else 0.0
        query, present = self._project(self.qkv(x_NQD))
        if past is not None:
            present = past.append(present)
        # Each new token attends to the past and to the new tokens up to itself: [Q, past + Q]
        tokens, length = query.shape[2], present.keys.shape[2]
        causal_QK = query.new_ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        of_past, sum_of_past = _attend_and_sum(query, present, causal_QK, dropout)

        # (N, H, Q, E) -> (B, H, W * Q, E): all queries of a prefix attend to its keys in one product.
        query_BWHQE = by_prefix.pad(query)
        query_BHE = query_BWHQE.transpose(1, 2).flatten(2, 3)
        attended, log_sum = _attend_and_sum(query_BHE, prefix, prefix_mask, dropout)
        # Output and logarithm side by side, so that both are put back in the sequences' order at once: [N, H, Q, E + 1]
        both = torch.cat([attended, log_sum[..., None]], -1).unflatten(2, (-1, tokens)).transpose(1, 2)
        both = by_prefix.pack(both)
        of_prefix, sum_of_prefix = both[..., :-1], both[..., -1]
        # The weight of the prefix is exp(its sum) / (exp(its sum) + exp(the past's sum)): a sigmoid.
        x = torch.lerp(of_past, of_prefix, torch.sigmoid(sum_of_prefix - sum_of_past)[..., None])
        return self.out(x.to(x_NQD.dtype).transpose(1, 2).flatten(2)), present

    def _project(self, projected: Tensor) -> tuple[Tensor, KeyValues]:
        query, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        return query, KeyValues(keys, values)


def _attend_and_sum(query: Tensor, memory: KeyValues, mask: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Return attention's output and the logarithm of the softmax's denominator.

    Dropout acts on the probabilities, so the denominator keeps all keys.
    """
    # In float32 at least: exponentials of half-precision scores would lose the small ones.
    scores = (query @ memory.keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    scores = scores.masked_fill(~mask, float("-inf"))
    attended = F.dropout(scores.softmax(-1).to(query.dtype), dropout) @ memory.values
    return attended.to(scores.dtype), scores.logsumexp(-1)


class PrefixBlock(TransformerBlock):
    """A transformer block with the usual weights and the three entry points of its attention."""

    attention: PrefixAttention

    def __init__(
        self, hidden: int, heads: int, intermediate: int, *, dropout: float, attention_dropout: float, eps: float
    ) -> None:
        super().__init__(hidden, heads, intermediate, dropout=dropout, attention_dropout=attention_dropout, eps=eps)
        self.attention = PrefixAttention(hidden, heads, attention_dropout)

    def encode_prefix(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> tuple[Tensor, KeyValues]:
        y_MD, keys_values = self.attention.encode_prefix(x_MD, mask, packing)
        return self._end(x_MD, y_MD), keys_values

    def after_prefix(self, x_MD: Tensor, mask: Tensor, packing: Packing, prefix: KeyValues) -> Tensor:
        return self._end(x_MD, self.attention.after_prefix(x_MD, mask, packing, prefix))

    def step_after_prefix(
        self, x_NQD: Tensor, past: KeyValues | None, prefix: KeyValues, prefix_mask: Tensor, by_prefix: Packing
    ) -> tuple[Tensor, KeyValues]:
        y_NQD, present = self.attention.step_after_prefix(x_NQD, past, prefix, prefix_mask, by_prefix)
        return self._end(x_NQD, y_NQD), present

    def _end(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.attention_end(x, y)
        return self.ffn_end(x, self.ffn(x))
