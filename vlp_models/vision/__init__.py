"""Images to regions: backbones and other sources of region features; contrib/detector trains on labeled boxes."""

from vlp_models.common.plugins import Table

# `features.source` -> module:function(region_source.SourceRequest) -> region_source.RegionSource
REGION_SOURCES = Table(
    "region_sources",
    {
        "timm": "vlp_models.vision.extractors:open_source",
        "grid": "vlp_models.vision.extractors:open_source",
        "boxes": "vlp_models.vision.extractors:open_symbols",
    },
)

# Of contrib: what reads images for a value of `features.source` -> module:function(settings, folder, device) ->
# region_source.Extractor; a value of `detector.source`, or of `features.source` with a section of its own ->
# module:function(params, workspace, folder) -> the stage's report; the latter -> module:function(that section), which
# checks it; `vision_warmup` -> module:function(model, its params, trainer's, workspace, where) -> a record for
# config.json
EXTRACTORS = Table("extractors", {})
DETECTORS = Table("detectors", {})
BACKBONE_CHECKS = Table("backbone_checks", {})
WARMUPS = Table("warmups", {})
