"""What step-by-step decoding keeps: keys and values of each layer, and the state of N hypotheses.

Shape suffixes: B images, R regions, H heads, K keys, E head dimension, N hypotheses.
"""

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
        # (B, H, K, E) and (B, H, K', E) -> (B, H, K + K', E)
        return KeyValues(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))

    def select(self, index_N: Tensor) -> KeyValues:
        return KeyValues(self.keys.index_select(0, index_N), self.values.index_select(0, index_N))

    def drop_last(self) -> KeyValues:
        """Return all but the last token's keys and values."""
        return KeyValues(self.keys[:, :, :-1], self.values[:, :, :-1])


@dataclass(frozen=True, kw_only=True)
class DecodingState:
    """The tokens read so far, for N hypotheses that describe B images.

    past      keys and values of each layer that attends to earlier tokens; empty before the first step
    memory    of the images; it has their number, `images`, and is never copied when hypotheses are reordered
    owner_N   int64: the image of each hypothesis
    by_image  the hypotheses packed by image
    """

    length: int
    max_len: int
    past: tuple[KeyValues, ...]
    memory: Any
    owner_N: Tensor
    by_image: Packing

    @classmethod
    def begin(cls, memory: Any, mask_BR: Tensor, *, max_len: int) -> DecodingState:
        """Start with one hypothesis per image and no token. mask_BR: any mask with one row per image."""
        owner_N = torch.arange(len(mask_BR), device=mask_BR.device)
        by_image = pack_by_image(owner_N, len(mask_BR))
        return cls(length=0, max_len=max_len, past=(), memory=memory, owner_N=owner_N, by_image=by_image)

    def reorder(self, index_N: Tensor) -> DecodingState:
        """Return the state in which hypothesis i continues hypothesis index[i]; their number may change."""
        if torch.equal(index_N, torch.arange(len(self.owner_N), device=index_N.device)):
            return self  # every hypothesis continues itself: no cache is copied
        owner_N = self.owner_N[index_N]
        past = tuple(layer.select(index_N) for layer in self.past)
        if torch.equal(owner_N, self.owner_N):  # the usual case in a beam search after its first step
            return replace(self, past=past)
        by_image = pack_by_image(owner_N, self.memory.images)
        return replace(self, past=past, owner_N=owner_N, by_image=by_image)


def pack_by_image(owner_N: Tensor, images: int) -> Packing:
    """Pack one row per hypothesis, those of an image side by side: [images, the most hypotheses of an image]."""
    rows_N = torch.arange(len(owner_N), device=owner_N.device)
    # (N, 1): each hypothesis is a sequence of one token, grouped by its image.
    return Packing(rows_N, (len(owner_N), 1)).by_owner(owner_N, images)
