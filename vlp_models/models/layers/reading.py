"""Causal layers that read a batch of sentences, and read it again after some words have changed.

A causal state depends on the words up to its own alone. So where a second reading of the same sentences differs from
the first only from some word on, what was computed before that word still holds, with its gradients: the second reading
computes the rest, packed, and looks back at the first one's keys and values. It also takes the first one's projected
memory. With dropout the two readings share what was dropped before the change; either alone is distributed as ever.

Shape suffixes: B batch, T text tokens, D hidden, M tokens read again, S memory tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vlp_models.models.layers.attention import KeyValues, MultiHeadAttention


class Reading:
    """A first reading: every token in its padded place, [B, T, D]. Keeps the keys and values of each layer."""

    def __init__(self) -> None:
        self.read: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.memories: dict[nn.Module, KeyValues] = {}

    def select(self, x_BTD: Tensor) -> Tensor:
        """The tokens that this reading computes, of all."""
        return x_BTD

    def padded(self, x: Tensor) -> Tensor:
        """Those tokens back in their places, [B, T, D]; whatever stands in the others."""
        return x

    def keys_values(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole sentences' in `layer`, [B, T, D] each, given those of the tokens that this reading computes."""
        self.read[layer] = keys, values
        return keys, values

    def memory(self, layer: MultiHeadAttention, memory_BSD: Tensor) -> KeyValues:
        """What `layer` attends to: the memory, projected."""
        self.memories[layer] = layer.project(memory_BSD)
        return self.memories[layer]


class Rereading(Reading):
    """A second reading, of the tokens `again_BT` alone: [M, D], in row-major order of the batch.

    In each sentence they must hold every token from the first changed one on that anybody will ask for, and the memory
    must be the first reading's.
    """

    def __init__(self, first: Reading, again_BT: Tensor) -> None:
        super().__init__()
        self.first = first
        self.shape = again_BT.shape
        self.index_M = again_BT.flatten().nonzero().squeeze(1)

    def select(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.flatten(0, 1).index_select(0, self.index_M)

    def padded(self, x: Tensor) -> Tensor:
        return self._written(x.new_zeros(*self.shape, x.shape[-1]), x)

    def keys_values(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before_keys, before_values = self.first.read[layer]
        return super().keys_values(layer, self._written(before_keys, keys), self._written(before_values, values))

    def memory(self, layer: MultiHeadAttention, memory_BSD: Tensor) -> KeyValues:
        self.memories[layer] = self.first.memories[layer]
        return self.memories[layer]

    def _written(self, into_BTD: Tensor, rows_MD: Tensor) -> Tensor:
        return into_BTD.flatten(0, 1).index_copy(0, self.index_M, rows_MD).unflatten(0, self.shape)


def changed_from(ids_BT: Tensor, before_BT: Tensor) -> Tensor:
    """Each sentence's tokens from the first on that is not what it was. bool [B, T]"""
    return torch.cumsum(ids_BT != before_BT, dim=1) > 0
