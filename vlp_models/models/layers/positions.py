"""Where a cell of an image's grid is, as sines and cosines.

Shape suffixes: B images, H and W cells, P half of the dimension, D dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sine_positions(mask_BHW: Tensor, dimension: int, *, temperature: float = 10000.0) -> Tensor:
    """[B, H, W, D], float32: the row in the first half, the column in the second, sines and cosines in turns.

    Rows and columns count from one to the last valid one, which is 2 pi (DETR, Carion et al. 2020, appendix A.4, as
    its code normalises them). Images of different sizes thus have their lower right corner at the same place.

    mask_BHW: bool, True where there is picture. dimension: a multiple of 4.
    """
    valid_BHW = mask_BHW.float()
    waves_P = torch.arange(dimension // 2, device=mask_BHW.device)
    period_P = temperature ** (2 * (waves_P // 2) / (dimension // 2))
    halves = []
    for axis in (1, 2):
        count_BHW = valid_BHW.cumsum(axis)
        angle_BHW = count_BHW / (count_BHW.select(axis, -1).unsqueeze(axis) + 1e-6) * (2 * math.pi)
        angle_BHWP = angle_BHW[..., None] / period_P
        halves.append(torch.stack([angle_BHWP[..., 0::2].sin(), angle_BHWP[..., 1::2].cos()], -1).flatten(-2))
    return torch.cat(halves, -1)
