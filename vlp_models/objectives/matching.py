"""Image-sentence matching as a ranking: a pair that belongs together is more similar than one that doesn't.

Triplet loss with the batch's other pairs as negatives ("Multibatch", Tadmor et al. 2016), in both directions.

The negatives of a pair are those of its batch, over all processes. An update that adds up several micro-batches
therefore has the negatives of a micro-batch, not of all of them: there its loss is the mean of the micro-batches', each
weighed by its pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss, Part, empty
from vlp_models.objectives.ranks import draw_categorical, gather_rows, number_over_ranks


def same_image(image_ids: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """bool [G, G]: True where two samples of the whole batch show one image and so are no negatives of each other."""
    numbers_G = number_over_ranks(image_ids)[0].to(device)
    return numbers_G[:, None] == numbers_G[None, :]


def similarities(texts_BE: Tensor, images_KE: Tensor) -> Tensor:
    """Of each text with each image, in float32 at least, whatever autocast says. [B, K]

    A contrast divides by a temperature of 0.07 or so. In bfloat16 a cosine near 1 is off by up to 0.004, and the logit
    by fifteen times as much.
    """
    with torch.autocast(texts_BE.device.type, enabled=False):
        return _at_least_float32(texts_BE) @ _at_least_float32(images_KE).T


def match_in_batch(
    texts_BE: Tensor,
    images_BE: Tensor,
    image_ids: Sequence[str],
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
) -> Loss:
    """`image_sentence_matching` of unit vectors; the negatives are those of all processes. The items are this
    process's pairs.

    Every process computes the whole batch's loss: [G, G] numbers, of which a batch of 4,096 pairs has 64 MiB.
    """
    numbers_G, own = number_over_ranks(image_ids)
    similarity_GG = similarities(gather_rows(texts_BE), gather_rows(images_BE))
    numbers_G = numbers_G.to(similarity_GG.device)
    same_GG = numbers_G[:, None] == numbers_G[None, :]
    return image_sentence_matching(similarity_GG, same_GG, margin=margin, negatives=negatives, own=own)


def image_sentence_matching(
    similarity_BB: Tensor,
    same_image_BB: Tensor,
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
    own: slice = slice(None),
) -> Loss:
    """similarity_BB: row = sentence, column = image; matching pairs on the diagonal. own: this process's rows.

    For each sentence against the images, and for each image against the sentences, max(0, margin - positive +
    negative): `all` takes the mean over the pairs that violate the margin, `hardest` each row's worst negative, mean
    over rows. The two directions add up. Zero where no pair has a negative, as in a batch of one.

    The items are the rows that have a negative; `sum` is that mean times those of `own`.
    `ism_accuracy`: the fraction of sentences whose own image is the most similar of the batch.
    """
    negative_BB = ~same_image_BB
    contested_B = negative_BB.any(1)
    if not bool(contested_B.any()):
        return empty(similarity_BB, "ism")
    similarity_BB = _at_least_float32(similarity_BB)
    positive_B = similarity_BB.diagonal()
    mean = _direction(similarity_BB, positive_B, negative_BB, contested_B, margin, negatives)
    mean = mean + _direction(similarity_BB.T, positive_B, negative_BB, contested_B, margin, negatives)

    best_negative_B = similarity_BB.masked_fill(same_image_BB, float("-inf")).amax(1)
    correct_B = (positive_B > best_negative_B) & contested_B
    count = contested_B[own].sum()
    total = mean * count
    return Loss(
        sum=total,
        count=count,
        parts={
            "ism": Part(sum=total.detach(), count=count),
            "ism_accuracy": Part(sum=correct_B[own].sum(), count=count),
        },
    )


def matched_or_not(matched_P: Tensor, mismatched_N: Tensor) -> Loss:
    """The other common form of ISM, as in ViLBERT: binary cross-entropy on the logits of pairs that belong together
    and of pairs that don't, summed over all of them."""
    logits = _at_least_float32(torch.cat([matched_P, mismatched_N]))
    labels = torch.cat([torch.ones_like(matched_P), torch.zeros_like(mismatched_N)]).to(logits.dtype)
    total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    correct = ((logits > 0) == (labels > 0)).sum()
    return Loss.of(total, len(logits), ism=total, ism_accuracy=correct)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype.itemsize < 4 else values


def _direction(
    similarity_BB: Tensor, positive_B: Tensor, negative_BB: Tensor, contested_B: Tensor, margin: float, negatives: str
) -> Tensor:
    cost_BB = (margin + similarity_BB - positive_B[:, None]).clamp(min=0) * negative_BB
    if negatives == "hardest":
        return cost_BB.amax(1).sum() / contested_B.sum()
    return cost_BB.sum() / (cost_BB > 0).sum().clamp(min=1)


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
