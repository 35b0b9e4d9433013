"""The visual dictionary: a feature's nearest code stands for it, and the codes follow the features they stand for.

Huang et al. 2021 (SOHO), section 3.2, equations 2 to 5. The codes are no parameters: after each of the optimiser's
updates they move towards what all of its micro-batches and processes mapped to them (objectives/moving_average.py).

`paper` is equation 4, applied to the codes that were hit. `released` is the public code's: a moving average of each
code's count and sum, whose quotient is the code, with counts smoothed as in VQ-VAE (van den Oord et al. 2017, appendix
A.1). Its codes move before they are handed out, and those never hit become zero in the first update, after which one
code an update can come alive at most. Both move codes alone, so neither has a loss of its own.

Shape suffixes: M features, K codes, D dimension, C candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from vlp_models.data.batch import Batch, Pixels
from vlp_models.models.protocols import Figure, Group, Patch
from vlp_models.models.soho.model import SOHO
from vlp_models.objectives.moving_average import FollowsUpdates
from vlp_models.objectives.ranks import gather_rows, sum_over_ranks

AT_ONCE = 16384  # features whose distances to all codes are held at a time
CANDIDATES = 256  # features of a micro-batch that a dead code may be put on
SMOOTHING = 1e-5
RESTING = 100  # updates without a hit, after which a code counts as dead in what is logged
NEVER = -(2**40)  # where `idle` counts from while a code was not hit yet: so far below zero that it stays there


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """vectors_MD: what stands for the features, gradients passing straight through to them (equation 5). codes_M int64:
    which codes these are. table_KD: the codes handed out, detached."""

    vectors_MD: Tensor
    codes_M: Tensor
    table_KD: Tensor


class Dictionary(FollowsUpdates):
    """`codes` [K, D], N(0, 1) at first, as the released one's; `idle` [K]: updates since each was last hit where it now
    is, or from `NEVER` on."""

    codes: Tensor
    idle: Tensor
    counts: Tensor  # of `released`: the moving averages
    sums: Tensor

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

    def forward(self, features_MD: Tensor, weights_M: Tensor | None = None, *, learn: bool = False) -> Mapped:
        """
        Args:
            weights_M: how often each feature counts; None: once.
            learn: in training, whether the codes follow these features.
        """
        with torch.autocast(features_MD.device.type, enabled=False):
            values_MD = features_MD.detach().to(self.codes.dtype)
            codes_M = self.nearest(values_MD)
            table_KD = self.codes
            if learn and self.training and torch.is_grad_enabled():
                total = self._totals(values_MD, codes_M, weights_M)
                self.add(total)
                self._keep_candidates(values_MD)
                if self.released:
                    table_KD = self._smoothed(*self._averaged(sum_over_ranks(total)))
            found_MD = table_KD.index_select(0, codes_M).to(features_MD.dtype)
        return Mapped(
            vectors_MD=features_MD + (found_MD - features_MD).detach(), codes_M=codes_M, table_KD=table_KD.detach()
        )

    @torch.no_grad()
    def nearest(self, values_MD: Tensor) -> Tensor:
        """int64 [M]: the code at the smallest distance (equation 2), of several the first."""
        squares_K = self.codes.square().sum(1)
        parts = [torch.addmm(squares_K, part, self.codes.T, alpha=-2).argmin(1) for part in values_MD.split(AT_ONCE)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=values_MD.device)

    def _totals(self, values_MD: Tensor, codes_M: Tensor, weights_M: Tensor | None) -> Tensor:
        """[K, D + 1]: of each code the sum of its features and, behind it, their number."""
        ones_M1 = torch.ones_like(values_MD[:, :1])
        rows = torch.cat([values_MD, ones_M1], 1)
        if weights_M is not None:
            rows = rows * weights_M[:, None].to(rows.dtype)
        return self.nothing().index_add_(0, codes_M, rows)

    def nothing(self) -> Tensor:
        return self.codes.new_zeros(len(self.codes), self.codes.shape[1] + 1)

    def fold(self, total: Tensor) -> None:
        """Nothing moves where nothing was mapped, as in a task that does not use the dictionary."""
        sums_KD, counts_K = total[:, :-1], total[:, -1]
        candidates, self._candidates = self._candidates, []
        if not bool(counts_K.any()):
            return
        hit_K = counts_K > 0
        if self.released:
            counts, sums = self._averaged(total)
            self.counts.copy_(counts)
            self.sums.copy_(sums)
            self.codes.copy_(self._smoothed(counts, sums))
        else:
            means_KD = sums_KD / counts_K.clamp(min=1)[:, None]
            self.codes.copy_(torch.where(hit_K[:, None], torch.lerp(means_KD, self.codes, self.momentum), self.codes))
        self.idle.copy_(torch.where(hit_K, 0, self.idle + 1))
        if self.revive_after:
            self._revive(torch.cat(candidates) if candidates else self.codes[:0])

    def _averaged(self, total: Tensor) -> tuple[Tensor, Tensor]:
        counts_K = torch.lerp(total[:, -1], self.counts, self.momentum)
        return counts_K, torch.lerp(total[:, :-1], self.sums, self.momentum)

    def _smoothed(self, counts_K: Tensor, sums_KD: Tensor) -> Tensor:
        whole = counts_K.sum()
        smoothed_K = (counts_K + SMOOTHING) / (whole + len(counts_K) * SMOOTHING) * whole
        return sums_KD / smoothed_K[:, None]

    # ---- Codes that nothing is mapped to -----------------------------------------------------------------------

    @property
    def alive(self) -> Tensor:
        """How many codes were hit in the last `RESTING` updates."""
        return ((self.idle >= 0) & (self.idle < RESTING)).sum()

    def _keep_candidates(self, values_MD: Tensor) -> None:
        """Features from all over this micro-batch, which the loader has shuffled."""
        if self.revive_after and len(values_MD):
            step = max(1, len(values_MD) // CANDIDATES)
            self._candidates.append(values_MD[::step][:CANDIDATES].clone())

    def _revive(self, candidates_CD: Tensor) -> None:
        """Puts each dead code on a feature of this update, the same one in every process."""
        candidates_CD = gather_rows(candidates_CD)
        idle = torch.where(self.idle < 0, self.idle - NEVER, self.idle)
        dead = (idle >= self.revive_after).nonzero().squeeze(1)
        count = min(len(dead), len(candidates_CD))
        if not count:
            return
        dead, step = dead[:count], len(candidates_CD) // count
        values = candidates_CD[::step][:count]
        self.codes[dead] = values
        self.idle[dead] = NEVER
        if self.released:
            self.counts[dead] = 1.0
            self.sums[dead] = values


CODES, PATCHES = 24, 8  # shown


@torch.no_grad()
def gathered_patches(model: SOHO, batches: Iterable[Batch]) -> list[Figure]:
    """One figure: codes at even distances from those in use, the commonest first, with patches of several images.

    Nothing without a dictionary, or where images are cropped: a cell's place in the file is then not known here.
    """
    if model.dictionary is None or model.config.resize == "crop":
        return []
    cells: Counter[int] = Counter()
    patches: dict[int, dict[str, Patch]] = {}
    images: dict[int, set[str]] = {}
    seen = 0
    was_training = model.training
    model.eval()
    for batch in batches:
        image = cast(Pixels, batch.image)
        grid = model.look(image)
        _, codes_BR, _ = model.map_to_codes(grid, learn=False)
        columns = grid.mask_BRR.shape[2]
        seen += len(image)
        for row, (image_id, codes) in enumerate(zip(batch.image_ids, codes_BR.tolist(), strict=True)):
            height, width = _size(image, row)
            for cell, code in enumerate(codes):
                if code < 0:
                    continue
                cells[code] += 1
                images.setdefault(code, set()).add(image_id)
                own = patches.setdefault(code, {})
                if image_id not in own and len(own) < PATCHES:
                    top, left = model.stride * (cell // columns), model.stride * (cell % columns)
                    box = left / width, top / height, (left + model.stride) / width, (top + model.stride) / height
                    own[image_id] = Patch(image_id=image_id, box=tuple(round(min(v, 1.0), 4) for v in box))  # type: ignore[arg-type]
    model.train(was_training)
    if not cells:
        return []
    ranked = [code for code, _ in cells.most_common()]
    shown = [ranked[i * len(ranked) // min(CODES, len(ranked))] for i in range(min(CODES, len(ranked)))]
    total = sum(cells.values())
    groups = tuple(
        Group(
            name=f"code {code}",
            note=f"{100 * cells[code] / total:.1f}% of the cells, in {len(images[code])} images",
            patches=tuple(patches[code].values()),
        )
        for code in shown
    )
    about = (
        f"{len(ranked)} of {len(model.dictionary.codes)} entries of the visual dictionary stand for the {total:,} "
        f"cells of {seen} val images. {len(shown)} of them, the commonest first, each with the first cell of several "
        "images."
    )
    return [Figure(title="What the visual dictionary gathers", about=about, groups=groups)]


def _size(image: Pixels, row: int) -> tuple[int, int]:
    """Of the picture as the model sees it, without padding."""
    if image.mask_BHW is None:
        return image.pixels_B3HW.shape[2], image.pixels_B3HW.shape[3]
    mask = image.mask_BHW[row]
    return int(mask.any(1).sum()), int(mask.any(0).sum())
