"""Which patches of an image to hide: blocks of them, as masked image modelling wants it (BEiT, algorithm 1).

Shape suffixes: B images, N patches.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vlp_models.objectives.ranks import own_share_of

SMALLEST = 16  # patches of a block, where that many are still to be hidden
NARROWEST = 0.3  # height to width of a block


def select_blocks(
    images: int, grid: tuple[int, int], share: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """bool [B, N]: blocks of random size, shape and place are hidden until `share` of each image's patches is.

    A seed for each image is drawn for the batch of all processes.
    """
    device_of_draws = generator.device
    seeds_B = own_share_of(
        (images,), lambda size: torch.randint(2**62, size, generator=generator, device=device_of_draws)
    )
    hidden = [_blocks(grid, share, np.random.default_rng(seed)) for seed in seeds_B.tolist()]
    stacked = np.stack(hidden) if hidden else np.zeros((0, grid[0] * grid[1]), dtype=bool)
    return torch.from_numpy(stacked).to(device)


def _blocks(grid: tuple[int, int], share: float, rng: np.random.Generator) -> np.ndarray:
    height, width = grid
    hidden, wanted = np.zeros(grid, dtype=bool), round(share * height * width)
    while (left := wanted - int(hidden.sum())) > 0:
        size, ratio = rng.uniform(min(SMALLEST, left), left), rng.uniform(NARROWEST, 1 / NARROWEST)
        rows = min(height, max(1, math.floor(math.sqrt(size * ratio))))
        columns = min(width, max(1, math.floor(math.sqrt(size / ratio))))
        top, start = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
        hidden[top : top + rows, start : start + columns] = True
    return hidden.flatten()
