"""Packed tokens: real tokens as rows, so that nothing is computed for a batch's padding.

Sequences of different lengths are padded to [B, T, D]; in a batch of captions half of these places are empty. Packed,
[M, D], only the real tokens are left. Linear layers, norms and feed-forward nets work on rows and need not know; only
attention needs the sequences, and pads its own inputs (layers/attention.py).

Packing also lets a second pass over the same sentences reuse the first. A causal state depends on its own and earlier
words only, so if the second pass reads other words from some place on, what the first one computed before that place is
still valid, with its gradients. The second pass packs the rest and attends to the keys and values that the first one
cached in each layer (`caching`, `continuing`). With dropout, the two passes share what was dropped before the change;
each alone has its usual distribution.

Shape suffixes: B sequences, T places, D hidden, M packed tokens, N sequences with an owner among B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.errors import DataError


class Projections:
    """Padded projections by layer. Not a dict: FSDP copies the dicts among a layer's arguments."""

    def __init__(self) -> None:
        self.of: dict[nn.Module, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Packing:
    """The places of the rows of [M, ...] in [B, T, ...].

    places_M  int64: indices into the B * T places, without duplicates
    shape     B and T
    split     of two sequences joined by `concat`: the number of rows that belong to the first
    full      every place has its row, in order: nothing needs to be copied
    cache     of a pass that another one may continue: each layer's padded projections
    previous  the packing of the pass that this one continues
    """

    places_M: Tensor
    shape: tuple[int, int]
    split: int = 0
    full: bool = False
    cache: Projections | None = None
    previous: Packing | None = None

    @classmethod
    def of(cls, mask_BT: Tensor) -> Packing:
        """Pack the True places, in row-major order. Synchronizes with a GPU once, to get their number."""
        # (B, T) -> (M,): the tokens of a sequence are adjacent rows.
        places_M = mask_BT.flatten().nonzero().squeeze(1)
        return cls(places_M, (mask_BT.shape[0], mask_BT.shape[1]), full=len(places_M) == mask_BT.numel())

    def caching(self) -> Packing:
        """Return the same packing for a pass that another one may continue."""
        return replace(self, cache=Projections())

    def continuing(self, previous: Packing) -> Packing:
        """Return the same packing for a pass that continues `previous`.

        In each sequence it must hold all tokens that are needed from the first changed one on."""
        return replace(self, cache=Projections(), previous=previous)

    def __len__(self) -> int:
        return self.places_M.shape[0]

    @property
    def sequences_M(self) -> Tensor:
        """The sequence of each row."""
        return self.places_M // self.shape[1]

    @property
    def positions_M(self) -> Tensor:
        """The position of each row in its sequence."""
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
        """[M, ...] -> [B, T, ...]; the other places are zero, or what the previous pass cached for `layer`."""
        if self.full:
            padded = x_M.unflatten(0, self.shape)
        elif self.previous is not None and layer is not None:
            # What came before the change is the previous pass's; this pass's rows replace the rest.
            assert self.previous.cache is not None, "the previous pass cached nothing"
            earlier = self.previous.cache.of[layer].flatten(0, 1)
            padded = earlier.index_copy(0, self.places_M, x_M).unflatten(0, self.shape)
        else:
            zeros = x_M.new_zeros(self.shape[0] * self.shape[1], *x_M.shape[1:])
            padded = zeros.index_copy(0, self.places_M, x_M).unflatten(0, self.shape)
        if self.cache is not None and layer is not None:
            self.cache.of[layer] = padded
        return padded

    def rows_at(self, selected_BT: Tensor) -> Tensor:
        """Return the rows at the selected places, int64."""
        return selected_BT.flatten().index_select(0, self.places_M).nonzero().squeeze(1)

    def first_rows(self) -> Tensor:
        """Return the row of each sequence's first token, int64 [B]. Synchronizes with a GPU once, unless all are full.

        Raises:
            DataError: a sequence has no first token.
        """
        count, length = self.shape
        if self.full and length:
            # Without padding, every T-th row is the first of a sequence.
            return torch.arange(0, count * length, length, device=self.places_M.device)
        rows_B = (self.positions_M == 0).nonzero().squeeze(1) if length else self.places_M
        if len(rows_B) != count:
            raise DataError(
                f"{count - len(rows_B)} of {count} texts in the batch have no first token: a text starts with [CLS], "
                "even if it has no word"
            )
        return rows_B

    def concat(self, other: Packing) -> Packing:
        """Join each sequence with the same sequence of `other`, placed after it. Rows: first all of this packing, then
        all of `other`; `split` is their boundary."""
        # Both keep their places in a wider table [B, T + T'], the other's after this one's.
        width = self.shape[1] + other.shape[1]
        first = self.sequences_M * width + self.positions_M
        second = other.sequences_M * width + self.shape[1] + other.positions_M
        return Packing(torch.cat([first, second]), (self.shape[0], width), split=len(self))

    def by_owner(self, owner_N: Tensor | None, owners: int) -> Packing:
        """Place the same rows side by side by owner: [owners, Q]. owner_N None: sequence i belongs to owner i."""
        if owner_N is None:
            return self
        owner_M = owner_N.index_select(0, self.sequences_M)
        counts = torch.bincount(owner_M, minlength=owners)
        order_M = owner_M.argsort(stable=True)  # rows by owner, each owner's in their present order
        # The rank of each row among its owner's rows is its new position.
        rank_M = torch.arange(len(self), device=owner_M.device) - (counts.cumsum(0) - counts)[owner_M[order_M]]
        width = max(1, int(counts.max())) if owners else 1
        places_M = owner_M * width + torch.empty_like(rank_M).index_copy(0, order_M, rank_M)
        # Full if every owner has equally many rows and they are together already: beams, and most tasks' texts.
        full = len(self) == owners * width and bool((places_M[1:] > places_M[:-1]).all())
        return Packing(places_M, (owners, width), full=full)


def take(x_R: Tensor, rows_M: Tensor) -> Tensor:
    """Select distinct rows of [R, ...]. The gradient is a copy, where that of `index_select` has to add."""
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
        # Each row was taken at most once, so its gradient is copied to its place; nothing adds up.
        (rows_M,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy(0, rows_M, grads[0]), None


def changed_from(ids_BT: Tensor, before_BT: Tensor) -> Tensor:
    """Return which tokens are at or after the first changed token of their sentence. bool [B, T]"""
    return torch.cumsum(ids_BT != before_BT, dim=1) > 0
