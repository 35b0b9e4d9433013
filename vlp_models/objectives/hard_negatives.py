"""Hard negatives: for each text an image that it resembles but does not describe, and the other way round.

J. Li et al.: "Align before Fuse", NeurIPS 2021, section 3.2; VLMo draws its matching pairs likewise: the more similar,
the likelier. Take the drawn rows with `ranks.take_rows`.

Shape suffixes: B rows of this process, G rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlp_models.objectives.categorical import draw_categorical
from vlp_models.objectives.ranks import number_over_ranks


def not_the_same_image(image_ids: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """bool [B, G]: True where a pair of this process and one of the whole batch show different images."""
    numbers_G, own = number_over_ranks(image_ids)
    return (numbers_G[own][:, None] != numbers_G[None, :]).to(device)


def draw_hard_negatives(
    similarity_BG: Tensor, negative_BG: Tensor, generator: torch.Generator, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Of each row a negative of the whole batch, drawn by softmax(similarity / temperature) over its negatives.

    negative_BG: bool, which may be drawn (`not_the_same_image`). No gradient passes.

    Returns int64 [B], rows of the whole batch, and bool [B], whether the row has a negative at all; where not, as in a
    batch of one, the first is 0 and means nothing.
    """
    if not negative_BG.shape[1]:  # no process has a row
        return torch.zeros_like(negative_BG[:, :1], dtype=torch.int64).sum(1), negative_BG.any(-1)
    logits_BG = (similarity_BG.detach().float() / temperature).masked_fill(~negative_BG, float("-inf"))
    has_B = negative_BG.any(-1)
    # A row whose softmax is a single one, or nothing, is as good as any other: weights are relative to its largest.
    largest_B1 = torch.where(has_B, logits_BG.amax(-1), 0.0)[:, None]
    return draw_categorical((logits_BG - largest_B1).exp(), generator), has_B
