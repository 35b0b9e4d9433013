"""Open the source of regions that `features.source` names: for the features stage, serving and drift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.plugins import absent_entries, import_target
from vlp_models.errors import CheckpointError, MissingToolError
from vlp_models.vision import EXTRACTORS

if TYPE_CHECKING:
    from vlp_models.vision.region_source import Extractor, ImageRegionSource, SourceRequest
    from vlp_models.vision.simple_regions import SymbolSource

FROM_IMAGES = ("timm", "grid", *EXTRACTORS, *absent_entries("extractors"))


def open_extractor(settings: Mapping[str, Any], directory: Path, device: str = "cpu") -> Extractor:
    """Return the extractor of a source that reads images.

    Args:
        settings: section `features` of params.yaml, or of a bundle's features.json.
        directory: data/detector or a copy of it.

    Raises:
        CheckpointError: `directory` lacks what the source needs, or it is damaged; or the source is not one of
            `FROM_IMAGES`.
        MissingToolError: the source is in a folder of contrib that does not exist.
    """
    source = settings["source"]
    if source == "grid":
        from vlp_models.vision.simple_regions import GridExtractor

        return GridExtractor()
    if source == "timm":  # its import takes two seconds
        from vlp_models.vision.timm_backbone import CellExtractor, load_backbone

        return CellExtractor(load_backbone(directory, device), max_regions=settings["max_regions"])
    if source in EXTRACTORS:
        extractor: Extractor = import_target(EXTRACTORS[source])(settings, directory, device)
        return extractor
    if folder := absent_entries("extractors").get(source):
        raise MissingToolError(f"`features.source: {source}` needs vlp_models/contrib/{folder}, which is not installed")
    raise CheckpointError(f"`features.source: {source}` does not extract regions from images")


def open_source(request: SourceRequest) -> ImageRegionSource:
    """Return the regions that the extractor finds in the image files of a project."""
    from vlp_models.params import to_plain
    from vlp_models.vision.region_source import ImageRegionSource

    workspace = request.workspace
    extractor = open_extractor(to_plain(request.params), workspace.detector, request.device)
    return ImageRegionSource(extractor, workspace.root)


def open_symbols(request: SourceRequest) -> SymbolSource:
    """Return the ground-truth objects of the validated data as regions."""
    from vlp_models.data.tables import read_table
    from vlp_models.vision.simple_regions import SymbolSource

    objects = read_table("objects", request.workspace.validated).to_pylist()
    return SymbolSource(objects, request.params.max_regions)
