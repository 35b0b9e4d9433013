"""TODO: say what this file is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlp_models.models.layers.packing import Packing


class KeyValues(NamedTuple):
    """Projected keys and values, [B, H, K, E] each: what decoding keeps instead of hidden states."""

    keys: Tensor
    values: Tensor

    def append(self, other: KeyValues) -> KeyValues:
        return KeyValues(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))

    def select(self, index_N: Tensor) -> KeyValues:
        return KeyValues(self.keys.index_select(0, index_N), self.values.index_select(0, index_N))

    def without_last(self) -> KeyValues:
        """But for the last token's."""
        return KeyValues(self.keys[:, :, :-1], self.values[:, :, :-1])


@dataclass(frozen=True, kw_only=True)
class DecodingState:
    """Everything read so far, for N hypotheses that continue descriptions of some images.

    past      keys and values of each layer that looks back; empty before the first step
    memory    of the images, of which it knows how many (`images`); never copied, whatever becomes of the hypotheses
    by_image  where each hypothesis stands among its image's
    """

    length: int
    max_len: int
    past: tuple[KeyValues, ...]
    memory: Any
    owner_N: Tensor
    by_image: Packing

    @classmethod
    def begin(cls, memory: Any, mask_BR: Tensor, *, max_len: int) -> DecodingState:
        """One hypothesis for each image, nothing read. mask_BR: of as many rows as images, on their device."""
        owner_N = torch.arange(len(mask_BR), device=mask_BR.device)
        by_image = hypotheses_by_image(owner_N, len(mask_BR))
        return cls(length=0, max_len=max_len, past=(), memory=memory, owner_N=owner_N, by_image=by_image)

    def reorder(self, index_N: Tensor) -> DecodingState:
        if torch.equal(index_N, torch.arange(len(self.owner_N), device=index_N.device)):
            return self  # every hypothesis goes on by itself: no cache is copied
        owner_N = self.owner_N[index_N]
        past = tuple(layer.select(index_N) for layer in self.past)
        if torch.equal(owner_N, self.owner_N):  # as in a beam search, once it has begun
            return replace(self, past=past)
        by_image = hypotheses_by_image(owner_N, self.memory.images)
        return replace(self, past=past, owner_N=owner_N, by_image=by_image)


def hypotheses_by_image(owner_N: Tensor, images: int) -> Packing:
    """One row for each hypothesis; those of an image side by side."""
    rows_N = torch.arange(len(owner_N), device=owner_N.device)
    return Packing(rows_N, (len(owner_N), 1)).by_owner(owner_N, images)
