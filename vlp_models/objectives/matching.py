"""Image-sentence matching (ISM): losses over pairs, and hard negatives.

Ranking: a triplet loss with the batch's other pairs as negatives ("Multibatch", Tadmor et al. 2016), in both
directions. A pair's negatives come from its batch, over all processes. An update that accumulates several micro-batches
has only each micro-batch's negatives; its loss is the mean of the micro-batches' losses, weighted by their pairs.

Hard negatives: for each text a similar image that it does not describe, and vice versa (J. Li et al.: "Align before
Fuse", NeurIPS 2021, section 3.2; VLMo draws its matching pairs the same way). Fetch the drawn rows with
`distributed.take_rows`.

Shape suffixes: B rows of this process, G rows of the whole batch, K other rows, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.distributed import draw_categorical, gather_rows, number_over_ranks
from vlp_models.objectives.loss import Loss, Part, at_least_float32, zero_loss


def similarities(texts_BE: Tensor, images_KE: Tensor) -> Tensor:
    """Return the dot product of each text with each image, in float32 at least, even under autocast. [B, K]

    A contrastive loss divides by a temperature of about 0.07. In bfloat16 a cosine near 1 has an error of up to 0.004,
    and the logit fifteen times that.
    """
    with torch.autocast(texts_BE.device.type, enabled=False):
        return at_least_float32(texts_BE) @ at_least_float32(images_KE).T


# ---- Losses ------------------------------------------------------------------------------------------------------


def match_in_batch(
    texts_BE: Tensor,
    images_BE: Tensor,
    image_ids: Sequence[str],
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
) -> Loss:
    """Return `image_sentence_matching` of unit vectors, with negatives from all processes.

    The items are this process's pairs. Every process computes the whole batch's [G, G] loss: 64 MiB for 4,096 pairs.
    """
    # Ids are compared by numbers, which can be gathered from other processes.
    numbers_G, local = number_over_ranks(image_ids)
    similarity_GG = similarities(gather_rows(texts_BE), gather_rows(images_BE))
    numbers_G = numbers_G.to(similarity_GG.device)
    same_GG = numbers_G[:, None] == numbers_G[None, :]
    return image_sentence_matching(similarity_GG, same_GG, margin=margin, negatives=negatives, local=local)


def image_sentence_matching(
    similarity_BB: Tensor,
    same_image_BB: Tensor,
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
    local: slice = slice(None),
) -> Loss:
    """Return the triplet loss of a matrix of similarities: row = sentence, column = image, matches on the diagonal.

    For each sentence against the images, and for each image against the sentences: max(0, margin - positive +
    negative). `all` averages over the pairs that violate the margin; `hardest` takes each row's worst negative and
    averages over rows. The two directions are added. Zero if no pair has a negative, as in a batch of one.

    The items are the rows that have a negative; `sum` is the average times the number of those in `local`, this
    process's rows. `ism_accuracy`: the share of sentences whose own image is the most similar in the batch.
    """
    negative_BB = ~same_image_BB
    has_negative_B = negative_BB.any(1)
    if not bool(has_negative_B.any()):
        return zero_loss(similarity_BB, "ism")
    similarity_BB = at_least_float32(similarity_BB)
    positive_B = similarity_BB.diagonal()

    def average_cost(similarity_BB: Tensor) -> Tensor:
        # By how much each other column violates its row's margin; pairs of one image cost nothing.
        cost_BB = (margin + similarity_BB - positive_B[:, None]).clamp(min=0) * negative_BB
        if negatives == "hardest":
            return cost_BB.amax(1).sum() / has_negative_B.sum()
        # Pairs that satisfy the margin cost nothing and are not counted, so they do not dilute the mean.
        return cost_BB.sum() / (cost_BB > 0).sum().clamp(min=1)

    # Sentences against images, then images against sentences.
    mean = average_cost(similarity_BB)
    mean = mean + average_cost(similarity_BB.T)

    best_negative_B = similarity_BB.masked_fill(same_image_BB, float("-inf")).amax(1)
    correct_B = (positive_B > best_negative_B) & has_negative_B
    count = has_negative_B[local].sum()
    # The training loop divides by the count of all processes, so each one adds its share of rows.
    total = mean * count
    return Loss(
        sum=total,
        count=count,
        parts={
            "ism": Part(sum=total.detach(), count=count),
            "ism_accuracy": Part(sum=correct_B[local].sum(), count=count),
        },
    )


def binary_matching(matched_P: Tensor, mismatched_N: Tensor) -> Loss:
    """Return the other common form of ISM, as in ViLBERT: binary cross-entropy, summed over all pairs.

    matched_P, mismatched_N: the logits of pairs that belong together and of pairs that do not.
    """
    # One positive logit for each pair: above zero, it is taken for a match.
    logits = at_least_float32(torch.cat([matched_P, mismatched_N]))
    labels = torch.cat([torch.ones_like(matched_P), torch.zeros_like(mismatched_N)]).to(logits.dtype)
    total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    correct = ((logits > 0) == (labels > 0)).sum()
    return Loss.of(total, len(logits), ism=total, ism_accuracy=correct)


# ---- Hard negatives ----------------------------------------------------------------------------------------------


def different_image_mask(image_ids: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """Return bool [B, G], True where a pair of this process and one of the whole batch have different images."""
    numbers_G, local = number_over_ranks(image_ids)
    return (numbers_G[local][:, None] != numbers_G[None, :]).to(device)


def draw_hard_negatives(
    similarity_BG: Tensor, negative_BG: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a negative for each row from the whole batch, by softmax(similarity) over its negatives.

    negative_BG: bool, the candidates (`different_image_mask`). No gradient flows back.

    Returns int64 [B], row numbers in the whole batch, and bool [B], whether the row has a negative at all. Where it has
    none, as in a batch of one, the first is 0 and must be ignored.
    """
    if not negative_BG.shape[1]:  # no process has any rows
        # (B, 0) -> (B,): a sum over no columns is zero.
        return torch.zeros_like(negative_BG[:, :1], dtype=torch.int64).sum(1), negative_BG.any(-1)
    logits_BG = similarity_BG.detach().float().masked_fill(~negative_BG, float("-inf"))
    has_B = negative_BG.any(-1)
    # Relative to its largest logit, a row keeps at least one weight of 1, however large the similarities.
    largest_B1 = torch.where(has_B, logits_BG.amax(-1), 0.0)[:, None]
    return draw_categorical((logits_BG - largest_B1).exp(), generator), has_B
