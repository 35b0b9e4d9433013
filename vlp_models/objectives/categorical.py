"""Draws from given distributions with an explicit generator, the same over any number of processes.

Shape suffixes: N rows, K outcomes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlp_models.objectives.masking import draw_uniform


def draw_categorical(weights_NK: Tensor, generator: torch.Generator) -> Tensor:
    """An outcome of each row, drawn with probabilities in proportion to its weights. int64 [N]

    weights_NK: zero or more. An outcome of weight zero is never drawn, however the sums round; of a row without any
    weight the draw is 0. By inversion: one uniform number a row, which comes from the generator's own device.
    """
    cumulative_NK = weights_NK.float().cumsum(-1)
    place_N1 = draw_uniform((len(weights_NK), 1), generator, weights_NK.device) * cumulative_NK[:, -1:]
    drawn_N = torch.searchsorted(cumulative_NK, place_N1, right=True).squeeze(-1)
    # The place may round up to the sum itself, behind which comes nothing.
    numbers_K = torch.arange(weights_NK.shape[-1], device=weights_NK.device)
    last_N = torch.where(weights_NK > 0, numbers_K, 0).amax(-1)
    return torch.minimum(drawn_N, last_N)
