"""What a text that is generated attends to of its image.

Shape suffixes: B images, P places of the prefix: [CLS], the regions, [SEP].
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
    """Keys and values of each layer, once an image."""

    layers: tuple[KeyValues, ...]
    mask_BP: Tensor

    @property
    def images(self) -> int:
        return self.mask_BP.shape[0]


class PrefixAttention(MultiHeadAttention):
    """Multi-head attention that can leave its keys and values, and go on behind those of a prefix."""

    def keep(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> tuple[Tensor, KeyValues]:
        """Self-attention; returns the keys and values, too, [B, H, P, E] each."""
        query, own = self._project(packing.pad(self.qkv(x_MD)))
        return self.out(packing.pack(self._attend(query, own, mask))), own

    def behind(self, x_MD: Tensor, mask: Tensor, packing: Packing, prefix: KeyValues) -> Tensor:
        """Self-attention of sequences behind their prefixes, one each. mask: [N, 1, Q, P + Q]."""
        query, own = self._project(packing.pad(self.qkv(x_MD)))
        return self.out(packing.pack(self._attend(query, prefix.append(own), mask)))

    def step_behind(
        self, x_NQD: Tensor, past: KeyValues | None, prefix: KeyValues, prefix_mask: Tensor, by_prefix: Packing
    ) -> tuple[Tensor, KeyValues]:
        """New tokens of N sequences, each after the one before it; returns the grown past, too.

        prefix_mask: [B, 1, 1, P]. by_prefix: one row a sequence, those of a prefix side by side.

        A softmax over two sets of keys is the mean of the softmaxes over each, weighted by the sums of their
        exponentials. So the prefix's keys stay where they are.
        """
        dropout = self.dropout if self.training else 0.0
        query, own = self._project(self.qkv(x_NQD))
        present = own if past is None else past.append(own)
        tokens, length = query.shape[2], present.keys.shape[2]
        causal_QK = query.new_ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        of_past, sum_of_past = _attend_and_sum(query, present, causal_QK, dropout)

        query_BWHQE = by_prefix.pad(query)
        query_BHE = query_BWHQE.transpose(1, 2).flatten(2, 3)  # [B, H, W * Q, E]
        found, total = _attend_and_sum(query_BHE, prefix, prefix_mask, dropout)
        both = torch.cat([found, total[..., None]], -1).unflatten(2, (-1, tokens)).transpose(1, 2)
        both = by_prefix.pack(both)
        of_prefix, sum_of_prefix = both[..., :-1], both[..., -1]
        x = torch.lerp(of_past, of_prefix, torch.sigmoid(sum_of_prefix - sum_of_past)[..., None])
        return self.out(x.to(x_NQD.dtype).transpose(1, 2).flatten(2)), present

    def _project(self, projected: Tensor) -> tuple[Tensor, KeyValues]:
        query, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        return query, KeyValues(keys, values)


def _attend_and_sum(query: Tensor, memory: KeyValues, mask: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """What the heads find, and the logarithm of the sum of the exponentials that they are divided by.

    Nothing is dropped of the sum: dropout is of the probabilities, which it makes.
    """
    scores = (query @ memory.keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    scores = scores.masked_fill(~mask, float("-inf"))
    found = F.dropout(scores.softmax(-1).to(query.dtype), dropout) @ memory.values
    return found.to(scores.dtype), scores.logsumexp(-1)


class PrefixBlock(TransformerBlock):
    """A transformer block with the same weights as any, in the three ways that its attention can be asked."""

    attention: PrefixAttention

    def __init__(
        self, hidden: int, heads: int, intermediate: int, *, dropout: float, attention_dropout: float, eps: float
    ) -> None:
        super().__init__(hidden, heads, intermediate, dropout=dropout, attention_dropout=attention_dropout, eps=eps)
        self.attention = PrefixAttention(hidden, heads, attention_dropout)

    def keep(self, x_MD: Tensor, mask: Tensor, packing: Packing) -> tuple[Tensor, KeyValues]:
        y_MD, own = self.attention.keep(x_MD, mask, packing)
        return self._end(x_MD, y_MD), own

    def behind(self, x_MD: Tensor, mask: Tensor, packing: Packing, prefix: KeyValues) -> Tensor:
        return self._end(x_MD, self.attention.behind(x_MD, mask, packing, prefix))

    def step_behind(
        self, x_NQD: Tensor, past: KeyValues | None, prefix: KeyValues, prefix_mask: Tensor, by_prefix: Packing
    ) -> tuple[Tensor, KeyValues]:
        y_NQD, present = self.attention.step_behind(x_NQD, past, prefix, prefix_mask, by_prefix)
        return self._end(x_NQD, y_NQD), present

    def _end(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.attention_end(x, y)
        return self.ffn_end(x, self.ffn(x))
