"""Several images per text in one sequence: a learned vector distinguishes the tokens of each image after the first.

Shape suffixes: D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.errors import ParamsError


class PlaceEmbedding(nn.Module):
    """A vector for each image after the first, zero at first. The first image has none, so alone it is unchanged."""

    def __init__(self, images: int, hidden: int) -> None:
        super().__init__()
        self.later = nn.Parameter(torch.zeros(images - 1, hidden))

    def forward(self, image_index: Tensor) -> Tensor:
        """Return a vector for each index of an image in its text, int64 [...] -> [..., D]."""
        # (images - 1, D) -> (images, D): a row of zeros for the first image.
        return F.embedding(image_index, F.pad(self.later, (0, 0, 1, 0)))


def place_embedding(images: int, hidden: int) -> PlaceEmbedding | None:
    """Return the embedding for `images_per_text` images; None for one, which needs no weights."""
    return PlaceEmbedding(images, hidden) if images > 1 else None


def add_places(x: Tensor, image_index: Tensor | None, embedding: PlaceEmbedding | None) -> Tensor:
    """Add to each token the vector of its image: x [..., D]; image_index [...], or None for one image per text.

    Raises:
        ParamsError: more images per text than `images_per_text`.
    """
    if image_index is None:
        return x
    images = int(image_index.max()) + 1 if image_index.numel() else 1
    images_per_text = 1 if embedding is None else len(embedding.later) + 1
    if images > images_per_text:
        raise ParamsError(
            f"{images} images for one text, but config.images_per_text of the model is {images_per_text}; set it to "
            f"{images}"
        )
    return x if embedding is None else x + embedding(image_index).to(x.dtype)
