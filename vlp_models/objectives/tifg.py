"""Text-conditioned image feature generation: tell the features of an image's regions from its description (XGPT).

Xia et al. 2020 (XGPT), equation 5.

Shape suffixes: M regions, D features.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from vlp_models.objectives.loss import Loss


def region_generation(generated_MD: Tensor, targets_MD: Tensor, *, reduction: Literal["mean", "sum"]) -> Loss:
    """The squared distance to the target, over the M regions; in float32 at least. No gradient reaches the target.

    reduction: over a region's D features; `sum` is the equation to the letter, D times as much. Both are logged:
    `tifg` is the mean, `tifg_squared` the sum.
    """
    if generated_MD.dtype.itemsize < 4:
        generated_MD = generated_MD.float()
    squared = (generated_MD - targets_MD.detach().to(generated_MD.dtype)).square().sum()
    mean = squared / generated_MD.shape[1]
    return Loss.of(mean if reduction == "mean" else squared, len(generated_MD), tifg=mean, tifg_squared=squared)
