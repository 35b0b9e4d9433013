"""A grid over the image as regions: what needs no detector, no boxes and no weights.

Each cell is scaled to a few pixels and their colours are its feature. It is crude, and it lets one's own pairs train
from the first minute; a backbone or a detector is what to move on to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from vlp_models.data.sample import RegionArrays
from vlp_models.vision.images import to_tensor
from vlp_models.vision.source import FromImages

CELLS = 4  # along each side
PIXELS = 8  # of a cell, along each side


class GridExtractor:
    """Images to 16 regions of 192 numbers: red, green and blue of 8 x 8 pixels, from -1 to 1."""

    detector_id = f"grid-{CELLS}-{PIXELS}"
    classes: tuple[str, ...] = ()
    feature_dim = PIXELS * PIXELS * 3
    device = "cpu"

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        return [self._regions(to_tensor(i) if isinstance(i, Image.Image) else i) for i in images]

    def _regions(self, pixels_3HW: Tensor) -> RegionArrays:
        side = CELLS * PIXELS
        small = Image.fromarray(pixels_3HW.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BOX)
        cells = np.asarray(small, np.float32).reshape(CELLS, PIXELS, CELLS, PIXELS, 3).transpose(0, 2, 1, 3, 4)
        features = cells.reshape(CELLS * CELLS, -1) / 127.5 - 1
        top, left = np.divmod(np.arange(CELLS * CELLS), CELLS)
        return RegionArrays(
            features=features.astype(np.float16),
            boxes=(np.stack([left, top, left + 1, top + 1], axis=1) / CELLS).astype(np.float32),
            class_probs=np.zeros((CELLS * CELLS, 0), np.float16),
            scores=np.ones(CELLS * CELLS, np.float32),
        )


class GridSource(FromImages):
    """A `RegionSource` of cells of a grid."""
