"""Interfaces of the features stage's sources (image files, symbols, imported files) and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image
from torch import Tensor

from vlp_models.common.io import hash_file
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.image_io import read_image

if TYPE_CHECKING:  # so that regions of an earlier run stay valid if other sections of params.yaml change
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import FeaturesParams

BACKGROUND = "__background__"  # always class 0
MISSING, UNREADABLE = "features_present", "features_readable"  # rules of the quarantine table: no (valid) features
Row = Mapping[str, Any]  # of the images table


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """What a source is opened with.

    device  cpu or cuda
    origin  `RegionSource.origin` of another process that opened the same source
    """

    params: FeaturesParams
    workspace: Workspace
    device: str = "cpu"
    origin: Any = None


class RegionSource(ABC):
    """A source of regions; its attributes describe all regions that it returns.

    classes     names, background first; empty if no class is known
    by_content  whether an image's regions depend only on its file, not on other files
    device      the device that computes them
    packages    further ones whose version may change the regions
    origin      of the files that it reads: another process need not hash their contents again
    """

    detector_id: str
    classes: tuple[str, ...] = ()
    feature_dim: int
    by_content: bool = False
    device: str = "cpu"
    packages: tuple[str, ...] = ()
    origin: Any = None

    @property
    def module(self) -> str:
        """The module whose code, and the code that it imports, determines the regions."""
        return type(self).__module__

    def check_images(self, images: Iterable[Row]) -> None:  # noqa: B027 - most sources have nothing to check
        """Raise a DataError if two images of the dataset would get the same regions by mistake."""

    @abstractmethod
    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Return the regions of each image, and rows of the quarantine table for what was left out.

        advance: callback for progress, called with the number of images just finished.
        """


class Extractor(Protocol):
    """A model that extracts the regions of an image; attributes as in `RegionSource`."""

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    device: str

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """Return the regions of each image, in order. images: PIL images, or uint8 tensors [3, H, W]."""
        ...


class ImageRegionSource(RegionSource):
    """The regions that an extractor finds in image files. An unreadable file is an error: validation has read it."""

    by_content = True

    def __init__(self, extractor: Extractor, root: Path) -> None:
        self.detector_id = extractor.detector_id
        self.classes = extractor.classes
        self.feature_dim = extractor.feature_dim
        self.device = extractor.device
        self.packages = getattr(extractor, "packages", ())
        self._extractor = extractor
        self._root = root

    @property
    def module(self) -> str:
        return type(self._extractor).__module__

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
