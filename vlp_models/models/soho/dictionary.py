"""The visual dictionary: each feature is replaced by its nearest code, and codes follow the features mapped to them.

Huang et al. 2021 (SOHO), section 3.2, equations 2 to 5. Codes are not parameters: after each optimizer update they move
towards the features that all its micro-batches and processes mapped to them (objectives/moving_average.py).

`paper` is equation 4, applied to the codes that were hit. `released` is the public code's rule: moving averages of each
code's count and sum, whose quotient is the code, with counts smoothed as in VQ-VAE (van den Oord et al. 2017, appendix
A.1). Its codes are updated before they are returned. Codes that are never hit become zero in the first update, after
which at most one code per update can come alive. Both rules move the codes only, so neither has a loss of its own.

Shape suffixes: M features, K codes, D dimension, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlp_models.objectives.distributed import gather_rows, sum_over_ranks
from vlp_models.objectives.moving_average import UpdateAccumulator

CHUNK = 16384  # features whose distances to all codes are held in memory at a time
CANDIDATES = 256  # features of a micro-batch that dead codes may be moved to
SMOOTHING = 1e-5
RESTING = 100  # updates without a hit after which a code counts as dead in the log
NEVER = -(2**40)  # start value of `idle` for codes without a hit: so far below zero that it stays negative


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """The dictionary's output.

    vectors_MD: the codes that replace the features, with straight-through gradients (equation 5). codes_M int64: their
    numbers. table_KD: all codes as used, detached.
    """

    vectors_MD: Tensor
    codes_M: Tensor
    table_KD: Tensor


class Dictionary(UpdateAccumulator):
    """A codebook.

    `codes` [K, D]: N(0, 1) initially, as in the public code. `idle` [K]: optimizer updates since each code was last
    hit at its present position; counts up from `NEVER` if it was not.
    """

    codes: Tensor
    idle: Tensor
    counts: Tensor  # `released` only: moving averages of each code's number of features,
    sums: Tensor  # and of their sum

    def __init__(
        self,
        size: int,
        dimension: int,
        *,
        momentum: float,
        update: Literal["paper", "released"] = "paper",
        revive_after: int = 0,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.released = update == "released"
        self.revive_after = revive_after
        self.register_buffer("codes", torch.randn(size, dimension))
        self.register_buffer("idle", torch.full((size,), NEVER))
        if self.released:
            self.register_buffer("counts", torch.zeros(size))
            self.register_buffer("sums", torch.zeros(size, dimension))
        self._candidates: list[Tensor] = []

    def forward(self, features_MD: Tensor, weights_M: Tensor | None = None, *, learn: bool = False) -> Quantized:
        """Replace each feature by its nearest code.

        Args:
            weights_M: how many times each feature counts in the update; None: once.
            learn: in training, whether the codes follow these features.
        """
        with torch.autocast(features_MD.device.type, enabled=False):
            values_MD = features_MD.detach().to(self.codes.dtype)
            codes_M = self.nearest(values_MD)
            table_KD = self.codes
            if learn and self.training and torch.is_grad_enabled():
                # (K, D + 1): the sum of each code's features and, in the last column, their number
                rows = torch.cat([values_MD, torch.ones_like(values_MD[:, :1])], 1)
                if weights_M is not None:
                    rows = rows * weights_M[:, None].to(rows.dtype)
                total = self.zero_total().index_add_(0, codes_M, rows)
                self.add(total)
                if self.revive_after and len(values_MD):
                    # Candidates for revival are from all over this micro-batch, which the loader has shuffled.
                    stride = max(1, len(values_MD) // CANDIDATES)
                    self._candidates.append(values_MD[::stride][:CANDIDATES].clone())
                if self.released:
                    # The public code returns the codes after this batch's update, over all processes.
                    table_KD = self._smoothed(*self._averaged(sum_over_ranks(total)))
            nearest_MD = table_KD.index_select(0, codes_M).to(features_MD.dtype)
        # Straight-through: the value is the code's, the gradient goes to the feature (equation 5).
        vectors_MD = features_MD + (nearest_MD - features_MD).detach()
        return Quantized(vectors_MD=vectors_MD, codes_M=codes_M, table_KD=table_KD.detach())

    @torch.no_grad()
    def nearest(self, values_MD: Tensor) -> Tensor:
        """Return the number of the nearest code, int64 [M] (equation 2); the first of several equally near codes."""
        # |c|^2 - 2 x.c orders the codes as |x - c|^2 does.
        squares_K = self.codes.square().sum(1)
        parts = [torch.addmm(squares_K, part, self.codes.T, alpha=-2).argmin(1) for part in values_MD.split(CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=values_MD.device)

    def zero_total(self) -> Tensor:
        return self.codes.new_zeros(len(self.codes), self.codes.shape[1] + 1)

    def apply_update(self, total: Tensor) -> None:
        """Move the codes. Without any feature, as in tasks that do not use the dictionary, nothing changes."""
        sums_KD, counts_K = total[:, :-1], total[:, -1]
        candidates, self._candidates = self._candidates, []  # of this update only
        if not bool(counts_K.any()):
            return
        hit_K = counts_K > 0
        if self.released:
            counts, sums = self._averaged(total)
            self.counts.copy_(counts)
            self.sums.copy_(sums)
            self.codes.copy_(self._smoothed(counts, sums))
        else:
            # Equation 4: codes = momentum * codes + (1 - momentum) * mean of the features mapped to them
            means_KD = sums_KD / counts_K.clamp(min=1)[:, None]
            moved_KD = torch.lerp(means_KD, self.codes, self.momentum)
            self.codes.copy_(torch.where(hit_K[:, None], moved_KD, self.codes))
        self.idle.copy_(torch.where(hit_K, 0, self.idle + 1))
        if self.revive_after:
            self._revive(torch.cat(candidates) if candidates else self.codes[:0])

    def _averaged(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moving averages of counts [K] and sums [K, D] after an update by `total`."""
        counts_K = torch.lerp(total[:, -1], self.counts, self.momentum)
        return counts_K, torch.lerp(total[:, :-1], self.sums, self.momentum)

    def _smoothed(self, counts_K: Tensor, sums_KD: Tensor) -> Tensor:
        # Laplace smoothing: counts keep their total and none is zero.
        total = counts_K.sum()
        smoothed_K = (counts_K + SMOOTHING) / (total + len(counts_K) * SMOOTHING) * total
        return sums_KD / smoothed_K[:, None]

    # ---- Dead codes --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> Tensor:
        """Return how many codes were hit in the last `RESTING` updates."""
        return ((self.idle >= 0) & (self.idle < RESTING)).sum()

    def _revive(self, candidates_CD: Tensor) -> None:
        """Move each dead code to a feature of this update, the same one in every process."""
        candidates_CD = gather_rows(candidates_CD)
        # Updates since the last hit; for a code that was never hit, since it was placed.
        idle = torch.where(self.idle < 0, self.idle - NEVER, self.idle)
        dead = (idle >= self.revive_after).nonzero().squeeze(1)
        count = min(len(dead), len(candidates_CD))
        if not count:
            return
        # Evenly spaced candidates: neighbors come from the same image.
        dead, step = dead[:count], len(candidates_CD) // count
        values = candidates_CD[::step][:count]
        self.codes[dead] = values
        self.idle[dead] = NEVER
        # As if one feature had been mapped to it, so that the averages start there.
        if self.released:
            self.counts[dead] = 1.0
            self.sums[dead] = values
