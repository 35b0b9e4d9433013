"""Images to regions: detectors, backbones and other sources of region features, and training on labeled boxes."""

from vlp_models.common.plugins import Table

# `features.source` -> module:function(region_source.SourceRequest) -> region_source.RegionSource
REGION_SOURCES = Table(
    "region_sources",
    {
        "detector": "vlp_models.vision.extractors:open_source",
        "timm": "vlp_models.vision.extractors:open_source",
        "grid": "vlp_models.vision.extractors:open_source",
        "boxes": "vlp_models.vision.extractors:open_symbols",
    },
)
