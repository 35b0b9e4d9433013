"""Real tokens as rows, so that nothing is computed in a batch's padding.

Sequences of different lengths are padded to [B, T, D]. In a batch of captions half of these places are empty. Packed,
[M, D], only the real tokens are there: linear layers, norms and feed-forward nets work on rows and never notice.
Attention alone needs to know which rows belong together; it pads for itself (`layers/attention.py`).

A causal state depends on the words up to its own alone. So where a second pass over the same sentences reads other
words from some place on, what was computed before that place still holds, with its gradients. The second pass packs
the rest and looks back at what the first one kept of each layer (`keeping`, `after`). With dropout the two passes share
what was dropped before the change; either alone is distributed as ever.

Shape suffixes: B sequences, T places, D hidden, M packed tokens, N sequences with an owner among B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the rows of [M, ...] stand in [B, T, ...].

    places_M  int64: among the B * T places, each at most once
    shape     B and T
    split     of two sequences side by side (`beside`): rows before it are the first one's
    full      every place has its row, in order: nothing has to be copied
    kept      of a pass that another may follow: what each layer computed, padded
    before    the pass that this one follows
    """

    places_M: Tensor
    shape: tuple[int, int]
    split: int = 0
    full: bool = False
    kept: dict[nn.Module, Tensor] | None = None
    before: Packing | None = None

    @classmethod
    def of(cls, mask_BT: Tensor) -> Packing:
        """The True places, in row-major order. Waits for a GPU once: their number has to be known."""
        places_M = mask_BT.flatten().nonzero().squeeze(1)
        return cls(places_M, (mask_BT.shape[0], mask_BT.shape[1]), full=len(places_M) == mask_BT.numel())

    def keeping(self) -> Packing:
        """The same, for a pass that another one follows."""
        return replace(self, kept={})

    def after(self, before: Packing) -> Packing:
        """The same, for a pass that follows `before`. In each sequence its rows must be every token from the first
        changed one on that anybody will ask for."""
        return replace(self, kept={}, before=before)

    def __len__(self) -> int:
        return self.places_M.shape[0]

    @property
    def sequences_M(self) -> Tensor:
        """Which sequence each row belongs to."""
        return self.places_M // self.shape[1]

    @property
    def positions_M(self) -> Tensor:
        """Which place of its sequence each row has."""
        return self.places_M % self.shape[1]

    @property
    def mask_BT(self) -> Tensor:
        """bool: True where there is a row."""
        mask = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=self.places_M.device)
        return mask.index_fill(0, self.places_M, True).unflatten(0, self.shape)

    def pack(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [M, ...]"""
        if self.full:
            return x_BT.flatten(0, 1)
        return take(x_BT.flatten(0, 1), self.places_M)

    def pad(self, x_M: Tensor, layer: nn.Module | None = None) -> Tensor:
        """[M, ...] -> [B, T, ...]. In the other places zeros, or what an earlier pass kept of `layer`."""
        if self.full:
            padded = x_M.unflatten(0, self.shape)
        elif self.before is not None and layer is not None:
            assert self.before.kept is not None, "the earlier pass kept nothing"
            earlier = self.before.kept[layer].flatten(0, 1)
            padded = earlier.index_copy(0, self.places_M, x_M).unflatten(0, self.shape)
        else:
            zeros = x_M.new_zeros(self.shape[0] * self.shape[1], *x_M.shape[1:])
            padded = zeros.index_copy(0, self.places_M, x_M).unflatten(0, self.shape)
        if self.kept is not None and layer is not None:
            self.kept[layer] = padded
        return padded

    def rows_at(self, selected_BT: Tensor) -> Tensor:
        """int64: the rows that stand in the selected places."""
        return selected_BT.flatten().index_select(0, self.places_M).nonzero().squeeze(1)

    def beside(self, other: Packing) -> Packing:
        """Each sequence and, behind it, the one of `other`. Rows: all of this, then all of the other."""
        width = self.shape[1] + other.shape[1]
        own = self.sequences_M * width + self.positions_M
        behind = other.sequences_M * width + self.shape[1] + other.positions_M
        return Packing(torch.cat([own, behind]), (self.shape[0], width), split=len(self))

    def by_owner(self, owner_N: Tensor | None, owners: int) -> Packing:
        """The same rows, side by side by owner: [owners, Q]. None: sequence i belongs to owner i."""
        if owner_N is None:
            return self
        owner_M = owner_N.index_select(0, self.sequences_M)
        counts = torch.bincount(owner_M, minlength=owners)
        order_M = owner_M.argsort(stable=True)
        rank_M = torch.arange(len(self), device=owner_M.device) - (counts.cumsum(0) - counts)[owner_M[order_M]]
        width = max(1, int(counts.max())) if owners else 1
        places_M = owner_M * width + torch.empty_like(rank_M).index_copy(0, order_M, rank_M)
        # As many of each, those of one together: beams, and texts as most tasks give them.
        full = len(self) == owners * width and bool((places_M[1:] > places_M[:-1]).all())
        return Packing(places_M, (owners, width), full=full)


def take(x_R: Tensor, rows_M: Tensor) -> Tensor:
    """Rows of [R, ...], none of them twice: so the gradient is a copy, where `index_select` would have to add."""
    taken: Tensor = _Take.apply(x_R, rows_M)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_R: Tensor, rows_M: Tensor) -> Tensor:
        ctx.save_for_backward(rows_M)
        ctx.shape = x_R.shape
        return x_R.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows_M,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy(0, rows_M, grads[0]), None


def changed_from(ids_BT: Tensor, before_BT: Tensor) -> Tensor:
    """Each sentence's tokens from the first on that is not what it was. bool [B, T]"""
    return torch.cumsum(ids_BT != before_BT, dim=1) > 0
