"""What can make regions of an image alone, by `features.source`: for the features stage, serving and drift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import CheckpointError

if TYPE_CHECKING:
    from vlp_models.vision.region_source import Extractor, ImageRegionSource

FROM_IMAGES = ("detector", "timm", "grid")


def open_extractor(settings: Mapping[str, Any], directory: Path, device: str = "cpu") -> Extractor:
    """
    Args:
        settings: of the section `features` of params.yaml, or of a bundle's features.json.
        directory: data/detector or a copy of it.

    Raises:
        CheckpointError: `directory` does not hold what `features.source` needs, or a damaged one; or the source is none
            of `FROM_IMAGES`.
    """
    source = settings["source"]
    if source == "grid":
        from vlp_models.vision.simple_regions import GridExtractor

        return GridExtractor()
    if source == "timm":
        from vlp_models.vision.timm_backbone import CellExtractor

        return CellExtractor.load(directory, device, max_regions=settings["max_regions"])
    if source == "detector":
        from vlp_models.vision.detector_regions import RegionExtractor

        return RegionExtractor.load(
            directory,
            device,
            min_score=settings["min_score"],
            max_regions=settings["max_regions"],
            content=settings.get("content", "roi"),  # bundles before there was a choice do not say
        )
    raise CheckpointError(f"regions from `{source}` can't be made from an image")


def open_source(settings: Mapping[str, Any], directory: Path, root: Path, device: str = "cpu") -> ImageRegionSource:
    """The `RegionSource` of `open_extractor`'s, over the image files below `root`."""
    from vlp_models.vision.detector_regions import DetectorSource
    from vlp_models.vision.simple_regions import GridSource
    from vlp_models.vision.timm_backbone import CellSource

    kinds: dict[str, type[ImageRegionSource]] = {"detector": DetectorSource, "timm": CellSource, "grid": GridSource}
    extractor = open_extractor(settings, directory, device)
    return kinds[settings["source"]](extractor, root)
