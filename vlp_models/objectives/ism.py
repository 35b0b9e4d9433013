"""Image-sentence matching as a ranking: a pair that belongs together is more similar than one that doesn't.

Triplet loss with the batch's other pairs as negatives ("Multibatch", Tadmor et al. 2016), in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss
from vlp_models.objectives.ranks import count_over_ranks, gather_rows, mean_over_batch, numbers_of
from vlp_models.objectives.token_loss import empty


def same_image(image_ids: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """bool [G, G]: True where two samples of the whole batch show one image and so are no negatives of each other."""
    numbers_G = numbers_of(image_ids)[0].to(device)
    return numbers_G[:, None] == numbers_G[None, :]


def match_in_batch(
    texts_BE: Tensor,
    images_BE: Tensor,
    image_ids: Sequence[str],
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
) -> Loss:
    """`image_sentence_matching` of unit vectors; the negatives are those of all processes.

    Every process computes the whole batch's loss: [G, G] numbers, of which a batch of 4,096 pairs has 64 MiB.
    """
    similarity_GG = gather_rows(texts_BE) @ gather_rows(images_BE).T
    same_GG = same_image(image_ids, similarity_GG.device)
    return image_sentence_matching(similarity_GG, same_GG, margin=margin, negatives=negatives)


def image_sentence_matching(
    similarity_BB: Tensor,
    same_image_BB: Tensor,
    *,
    margin: float = 0.2,
    negatives: Literal["all", "hardest"] = "all",
) -> Loss:
    """similarity_BB: row = sentence, column = image; matching pairs on the diagonal.

    For each sentence against the images, and for each image against the sentences, max(0, margin - positive +
    negative): `all` takes the mean over the pairs that violate the margin, `hardest` each row's worst negative, mean
    over rows. The two directions add up. Zero where no pair has a negative, as in a batch of one.

    `ism_accuracy`: the fraction of sentences whose own image is the most similar of the batch.
    """
    negative_BB = ~same_image_BB
    contested_B = negative_BB.any(1)
    if not bool(contested_B.any()):
        return empty(similarity_BB, "ism")
    similarity_BB = similarity_BB.float() if similarity_BB.dtype.itemsize < 4 else similarity_BB
    positive_B = similarity_BB.diagonal()
    total = _direction(similarity_BB, positive_B, negative_BB, contested_B, margin, negatives)
    total = total + _direction(similarity_BB.T, positive_B, negative_BB, contested_B, margin, negatives)

    best_negative_B = similarity_BB.masked_fill(same_image_BB, float("-inf")).amax(1)
    accuracy = (positive_B > best_negative_B)[contested_B].float().mean()
    return Loss(total=total, parts={"ism": total.detach(), "ism_accuracy": accuracy})


def matched_or_not(matched_P: Tensor, mismatched_N: Tensor) -> Loss:
    """The other common form of ISM, as in ViLBERT: binary cross-entropy on the logits of pairs that belong together
    and of pairs that don't, mean over all of them and all processes."""
    logits = torch.cat([matched_P, mismatched_N])
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    labels = torch.cat([torch.ones_like(matched_P), torch.zeros_like(mismatched_N)]).to(logits.dtype)
    if count_over_ranks(len(logits)) == 0:
        return empty(logits, "ism")
    total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    correct = ((logits > 0) == (labels > 0)).sum()
    loss, (mean, accuracy) = mean_over_batch(total, len(logits), correct)
    return Loss(total=loss, parts={"ism": mean, "ism_accuracy": accuracy})


def _direction(
    similarity_BB: Tensor, positive_B: Tensor, negative_BB: Tensor, contested_B: Tensor, margin: float, negatives: str
) -> Tensor:
    cost_BB = (margin + similarity_BB - positive_B[:, None]).clamp(min=0) * negative_BB
    if negatives == "hardest":
        return cost_BB.amax(1).sum() / contested_B.sum()
    return cost_BB.sum() / (cost_BB > 0).sum().clamp(min=1)
