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

# Of contrib/detector: what reads images for a value of `features.source` -> module:function(settings, folder, device)
# -> region_source.Extractor; a value of `detector.source` -> module:function(params, workspace, folder) -> the stage's
# report; `vision_warmup` -> module:function(model, its params, trainer's, workspace, where) -> a record for config.json
EXTRACTORS = Table("extractors", {})
DETECTORS = Table("detectors", {})
WARMUPS = Table("warmups", {})
