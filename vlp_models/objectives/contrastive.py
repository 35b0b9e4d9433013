"""Image-text contrastive losses (ITC): which image in the batch a text describes, and which text describes an image.

A. Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, figure 3; VLMo,
section 3.3; InfoNCE (van den Oord et al. 2018, equation 4) in both directions, averaged. Two pairs of the same image
are not each other's negatives.

Candidates come from all processes, and gradients flow back to the process that computed them. In an update that
accumulates several micro-batches, candidates come from one micro-batch, unless the embeddings of the others are given
(`EmbeddedPairs`; Gao et al.: "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021). Those
then count as candidates and as rows. Summed over the micro-batches, the gradient equals that of one large batch.

Shape suffixes: B pairs of this process, K pairs of its other micro-batches, G pairs of all processes, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.distributed import gather_rows, number_over_ranks
from vlp_models.objectives.loss import Loss, zero_loss
from vlp_models.objectives.matching import similarities


@dataclass(frozen=True, kw_only=True)
class EmbeddedPairs:
    """Detached unit vectors: pair i is text i and image i, with the id `image_ids[i]`."""

    texts_KE: Tensor
    images_KE: Tensor
    image_ids: tuple[str, ...]


def concatenate_pairs(parts: Sequence[EmbeddedPairs]) -> EmbeddedPairs:
    """Return the pairs of several micro-batches as one."""
    return EmbeddedPairs(
        texts_KE=torch.cat([pairs.texts_KE for pairs in parts]),
        images_KE=torch.cat([pairs.images_KE for pairs in parts]),
        image_ids=tuple(image_id for pairs in parts for image_id in pairs.image_ids),
    )


def image_text_contrast(
    texts_BE: Tensor,
    images_BE: Tensor,
    image_ids: Sequence[str],
    scale: Tensor,
    *,
    name: str = "itc",
    other_pairs: EmbeddedPairs | None = None,
) -> Loss:
    """Return the contrastive loss of unit vectors; pair i is text i and image i. scale: 1 / temperature.

    The items are this process's pairs that have a negative; in a batch of one image, none has. `<name>_accuracy`: the
    share of texts whose own image is the most similar.
    """
    local_count = len(image_ids)
    if other_pairs is not None:
        texts_BE, images_BE = torch.cat([texts_BE, other_pairs.texts_KE]), torch.cat([images_BE, other_pairs.images_KE])
        image_ids = (*image_ids, *other_pairs.image_ids)
    pair_B, twin_BG = _find_pairs(image_ids, texts_BE.device)
    if not twin_BG.shape[1]:
        return zero_loss(texts_BE + images_BE, name)
    has_negative_B = _have_negative(pair_B, twin_BG)

    # A row's gradient to the temperature counts only in the row's own micro-batch.
    scale_B1 = torch.cat([scale.expand(local_count), scale.detach().expand(len(pair_B) - local_count)])[:, None]
    # Texts against all images, and images against all texts: [B, G] each
    directions = (texts_BE, gather_rows(images_BE)), (images_BE, gather_rows(texts_BE))
    logits = [(scale_B1 * similarities(a, b)).masked_fill(twin_BG, float("-inf")) for a, b in directions]
    # (2, B) -> (B,): both directions have equal weight.
    loss_B = torch.stack([F.cross_entropy(logits_BG, pair_B, reduction="none") for logits_BG in logits]).mean(0)
    rest = loss_B[local_count:].sum()
    correct_B = (logits[0].argmax(1) == pair_B) & has_negative_B
    loss = Loss.of(
        loss_B[:local_count].sum(),
        has_negative_B[:local_count].sum(),
        **{name: loss_B[:local_count].sum(), f"{name}_accuracy": correct_B[:local_count].sum()},
    )
    # The rows of other micro-batches add a gradient but no value: their loss is counted in their own micro-batch.
    return Loss(sum=loss.sum + (rest - rest.detach()), count=loss.count, parts=loss.parts)


def image_text_sigmoid(
    texts_BE: Tensor, images_BE: Tensor, image_ids: Sequence[str], scale: Tensor, bias: Tensor, *, name: str = "itc"
) -> Loss:
    """Return the sigmoid loss of unit vectors: each text with each image is a pair or not.

    X. Zhai et al.: "Sigmoid Loss for Language Image Pre-Training", ICCV 2023, equation 1. The image of another
    pair counts as neither if it is the same image.
    """
    pair_B, twin_BG = _find_pairs(image_ids, texts_BE.device)
    if not twin_BG.shape[1]:
        return zero_loss(texts_BE + images_BE, name)
    # [B, G]: this process's texts with the images of all, so each combination is counted once over all processes.
    logits_BG = scale * similarities(texts_BE, gather_rows(images_BE)) + bias
    is_pair_BG = torch.zeros_like(twin_BG).scatter(1, pair_B[:, None], True)
    loss_B = F.softplus(torch.where(is_pair_BG, -logits_BG, logits_BG)).masked_fill(twin_BG, 0.0).sum(1)
    has_negative_B = _have_negative(pair_B, twin_BG)
    correct_B = (logits_BG.masked_fill(twin_BG, float("-inf")).argmax(1) == pair_B) & has_negative_B
    count, total = has_negative_B.sum(), loss_B[has_negative_B].sum()
    return Loss.of(total, count, **{name: total, f"{name}_accuracy": correct_B.sum()})


def _find_pairs(image_ids: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return of this process's pairs int64 [B], their numbers among those of all, and bool [B, G], their twins there.

    A twin is another pair of the same image.
    """
    numbers_G, local = number_over_ranks(image_ids)
    numbers_G = numbers_G.to(device)
    # (B,): the column of each row's own partner among the G candidates, which is its target.
    pair_B = torch.arange(local.start, local.stop, device=device)
    # [B, G]: pairs of the same image. A pair itself is the target, so only its twins are masked out.
    twin_BG = numbers_G[pair_B][:, None] == numbers_G[None, :]
    return pair_B, twin_BG.scatter(1, pair_B[:, None], False) if len(numbers_G) else twin_BG


def _have_negative(pair_B: Tensor, twin_BG: Tensor) -> Tensor:
    """Return bool [B]: whether there is a pair of another image."""
    return ~twin_BG.scatter(1, pair_B[:, None], True).all(1)
