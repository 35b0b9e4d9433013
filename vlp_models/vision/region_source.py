"""What the features stage draws regions from: image files, symbols, or imported files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.image_io import read_image

Row = Mapping[str, Any]  # of the images table


class RegionSource(Protocol):
    """Attributes describe every region it returns.

    classes     the background first; empty: no class known
    by_content  whether an image's regions follow from its file alone, and not from other files beside it
    device      that computes them
    """

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    by_content: bool
    device: str

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """The regions of each image, and rows of the quarantine table for what was left out.

        advance: told how many more images are done.
        """
        ...


class Extractor(Protocol):
    """What makes regions of an image alone; attributes as in `RegionSource`."""

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    device: str

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """The regions of each image, in the order given. images: pictures, or uint8 tensors [3, H, W]."""
        ...


class ImageRegionSource:
    """A `RegionSource` that reads the image files. An unreadable one is a `DataError`: validation has seen it whole.

    A subclass for each extractor stands in the extractor's module, whose code is part of what its regions depend on.
    """

    by_content = True

    def __init__(self, extractor: Extractor, root: Path) -> None:
        self.detector_id = extractor.detector_id
        self.classes = extractor.classes
        self.feature_dim = extractor.feature_dim
        self.device = extractor.device
        self._extractor = extractor
        self._root = root

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        found = []
        for row in images:
            picture = read_image(self._root / row["path"], row["width"], row["height"])
            try:
                found += self._extractor.extract([picture])
            except DataError as error:
                raise DataError(f"{row['path']}: {error}") from None
            advance(1)
        return found, []


def quarantine_row(image: Row, rule: str, reason: str, provenance: str) -> dict[str, Any]:
    """A row of the quarantine table."""
    return {
        "table": "features",
        "row_id": image["image_id"],
        "rule": rule,
        "reason": reason,
        "provenance": provenance,
    }
