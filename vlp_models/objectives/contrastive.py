"""Image-text contrast: which of the batch's images is a text about, and which of its texts is about an image?

A. Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, figure 3; VLMo,
section 3.3; InfoNCE (van den Oord et al. 2018, equation 4) both ways, halved. Two pairs of one image are no negatives
of each other.

The candidates are those of all processes, and gradients flow to whoever made them. Of an update that adds up several
micro-batches they are a micro-batch's, unless the others' embeddings are given (`Pairs`; Gao et al.: "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", 2021): these count as candidates, and as rows that the
present ones may confuse. Added up over the micro-batches, the gradient is then that of one large batch.

Shape suffixes: B pairs of this process, K those of its other micro-batches, G of all processes, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss, empty
from vlp_models.objectives.matching import similarities
from vlp_models.objectives.ranks import gather_rows, number_over_ranks


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Embedded pairs, unit length, detached: pair i is text i and image i, the image `image_ids[i]`."""

    texts_KE: Tensor
    images_KE: Tensor
    image_ids: tuple[str, ...]


def joined(several: Sequence[Pairs]) -> Pairs:
    return Pairs(
        texts_KE=torch.cat([pairs.texts_KE for pairs in several]),
        images_KE=torch.cat([pairs.images_KE for pairs in several]),
        image_ids=tuple(image_id for pairs in several for image_id in pairs.image_ids),
    )


def image_text_contrast(
    texts_BE: Tensor,
    images_BE: Tensor,
    image_ids: Sequence[str],
    scale: Tensor,
    *,
    name: str = "itc",
    others: Pairs | None = None,
) -> Loss:
    """Pair i is text i and image i, unit vectors both. scale: one divided by the temperature.

    The items are this process's pairs that have a negative: in a batch of one image nobody has. `<name>_accuracy`: the
    fraction of texts whose own image is the most similar.
    """
    now = len(image_ids)
    if others is not None:
        texts_BE, images_BE = torch.cat([texts_BE, others.texts_KE]), torch.cat([images_BE, others.images_KE])
        image_ids = (*image_ids, *others.image_ids)
    numbers_G, own = number_over_ranks(image_ids)
    if not len(numbers_G):
        return empty(texts_BE + images_BE, name)
    numbers_G = numbers_G.to(texts_BE.device)
    pair_B = torch.arange(own.start, own.stop, device=texts_BE.device)
    twin_BG = numbers_G[pair_B][:, None] == numbers_G[None, :]
    contested_B = ~twin_BG.all(1)
    twin_BG = twin_BG.scatter(1, pair_B[:, None], False)

    # For the temperature, too, each row counts in the micro-batch that it belongs to.
    scale_B1 = torch.cat([scale.expand(now), scale.detach().expand(len(pair_B) - now)])[:, None]
    ways = (texts_BE, gather_rows(images_BE)), (images_BE, gather_rows(texts_BE))
    logits = [(scale_B1 * similarities(a, b)).masked_fill(twin_BG, float("-inf")) for a, b in ways]
    loss_B = torch.stack([F.cross_entropy(one, pair_B, reduction="none") for one in logits]).mean(0)
    rest = loss_B[now:].sum()
    right_B = (logits[0].argmax(1) == pair_B) & contested_B
    loss = Loss.of(
        loss_B[:now].sum(),
        contested_B[:now].sum(),
        **{name: loss_B[:now].sum(), f"{name}_accuracy": right_B[:now].sum()},
    )
    return Loss(sum=loss.sum + (rest - rest.detach()), count=loss.count, parts=loss.parts)
