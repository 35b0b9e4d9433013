"""Open the region extractor that `features.source` names: for the features stage, serving and drift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import CheckpointError

if TYPE_CHECKING:
    from vlp_models.vision.region_source import Extractor, ImageRegionSource

FROM_IMAGES = ("detector", "timm", "grid")


def open_extractor(settings: Mapping[str, Any], directory: Path, device: str = "cpu") -> Extractor:
    """Return the extractor of a source that reads images.

    Args:
        settings: section `features` of params.yaml, or of a bundle's features.json.
        directory: data/detector or a copy of it.

    Raises:
        CheckpointError: `directory` lacks what the source needs, or it is damaged; or the source is not one of
            `FROM_IMAGES`.
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
            content=settings["content"],
        )
    raise CheckpointError(f"`features.source: {source}` does not extract regions from images")


def open_source(settings: Mapping[str, Any], directory: Path, root: Path, device: str = "cpu") -> ImageRegionSource:
    """Return the extractor's `RegionSource` over the image files below `root`."""
    extractor = open_extractor(settings, directory, device)
    if settings["source"] == "grid":
        from vlp_models.vision.simple_regions import GridSource

        return GridSource(extractor, root)
    if settings["source"] == "timm":  # its import takes two seconds
        from vlp_models.vision.timm_backbone import CellSource

        return CellSource(extractor, root)
    from vlp_models.vision.detector_regions import DetectorSource

    return DetectorSource(extractor, root)
