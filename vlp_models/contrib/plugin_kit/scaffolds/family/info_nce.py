"""InfoNCE: which of the batch's images is a text about, and which text is about an image?

A. van den Oord, Y. Li, O. Vinyals: "Representation Learning with Contrastive Predictive Coding", 2018, equation 4; in
both directions as in CLIP. Two texts of one image are no negatives of each other.

Shape suffixes: N pairs of this process, G pairs of the whole batch, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.distributed import gather_rows, number_over_ranks
from vlp_models.objectives.loss import Loss, zero_loss
from vlp_models.objectives.matching import similarities


def info_nce(texts_NE: Tensor, images_NE: Tensor, image_ids: Sequence[str], scale: Tensor) -> Loss:
    """Pair i is text i and image i, unit vectors both; the items are the pairs of this process, the negatives of all.

    image_ids: the image of each pair. scale: one divided by the temperature.
    """
    # (G,) a number per image id, equal for equal images, and the slice of this process's pairs.
    numbers_G, local = number_over_ranks(image_ids)
    if not len(numbers_G):
        return zero_loss(texts_NE, "contrast")
    # (G, G): texts of all processes against images of all processes, so every process has all negatives.
    logits_GG = scale * similarities(gather_rows(texts_NE), gather_rows(images_NE))
    # Other texts of the same image are not negatives; the diagonal is each text's own image, the positive.
    same_image_GG = (numbers_G[:, None] == numbers_G[None, :]).fill_diagonal_(False)
    logits_GG = logits_GG.masked_fill(same_image_GG.to(logits_GG.device), float("-inf"))
    # Text i belongs to image i: the right answer of row i is column i.
    pair_G = torch.arange(len(logits_GG), device=logits_GG.device)
    to_image_G = F.cross_entropy(logits_GG, pair_G, reduction="none")
    to_text_G = F.cross_entropy(logits_GG.T, pair_G, reduction="none")
    # Only this process's pairs count, as the other processes add theirs; half of each direction.
    total = (to_image_G + to_text_G)[local].sum() / 2
    right = (logits_GG.argmax(1) == pair_G)[local].sum()
    return Loss.of(total, len(image_ids), contrast=total, contrast_accuracy=right)
