"""Interfaces of the features stage's sources (image files, symbols, imported files) and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vlp_models.common.io import hash_file
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.image_io import read_image

BACKGROUND = "__background__"  # always class 0
Row = Mapping[str, Any]  # of the images table


class RegionSource(Protocol):
    """A source of regions; its attributes describe all regions that it returns.

    classes     names, background first; empty if no class is known
    by_content  whether an image's regions depend only on its file, not on other files
    device      the device that computes them
    """

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    by_content: bool
    device: str

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Return the regions of each image, and rows of the quarantine table for what was left out.

        advance: callback for progress, called with the number of images just finished.
        """
        ...


class Extractor(Protocol):
    """A model that extracts the regions of an image; attributes as in `RegionSource`."""

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    device: str

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """Return the regions of each image, in order. images: PIL images, or uint8 tensors [3, H, W]."""
        ...


class ImageRegionSource:
    """A `RegionSource` that reads image files. An unreadable file is an error: validation has read it before.

    Each extractor has a subclass in its own module, whose code is part of the features' fingerprint.
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
        """
        Raises:
            DataError: an image can't be read, has too few pixels, or is not the file that `prepare` has checked.
        """
        regions = []
        for row in images:
            path = self._root / row["path"]
            picture = read_image(path, row["width"], row["height"])
            if row.get("sha256") and hash_file(path) != row["sha256"]:  # its regions are kept under this hash
                raise DataError(f"{path}: has changed since `prepare`; run `dvc repro validate`, or `vlp run`")
            try:
                regions += self._extractor.extract([picture])
            except DataError as error:
                raise DataError(f"{row['path']}: {error}") from None
            advance(1)
        return regions, []


def object_words(row: Mapping[str, Any]) -> list[str]:
    """Return the words that describe a row of the table `objects`: its category and its attributes."""
    return [*row["category"].split(), *(row.get("attributes") or [])]


def quarantine_row(image: Row, rule: str, reason: str, provenance: str) -> dict[str, Any]:
    """Return a row of the quarantine table."""
    return {
        "table": "features",
        "row_id": image["image_id"],
        "rule": rule,
        "reason": reason,
        "provenance": provenance,
    }
