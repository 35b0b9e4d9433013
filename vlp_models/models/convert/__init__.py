"""Convert other programs' checkpoints to the families' names and configs.

mapping.py is what all converters share; bert.py and timm.py read BERT's and timm's weights for any family that has a
place for them; one file a family maps the checkpoints of its authors' code.
"""

from __future__ import annotations

from vlp_models.common.plugins import Table

# family -> module:function(state, config.json of the BERT, the family's config) -> bert.ConvertedBert
READERS = Table(
    "text_readers",
    {
        "tden": "vlp_models.models.convert.tden:convert_bert",
        "unified_vlp": "vlp_models.models.convert.unified_vlp:convert_bert",
        "xgpt": "vlp_models.models.convert.xgpt:convert_bert",
        "vlmo": "vlp_models.models.convert.vlmo:convert_bert",
        "soho": "vlp_models.models.convert.soho:convert_bert",
    },
)

# family -> module:function(source, mapping.ImportRequest) -> mapping.ImportedModel, for timm's weights
IMAGE_READERS = Table(
    "image_readers",
    {
        "soho": "vlp_models.models.convert.soho:read_timm_backbone",
        "vlmo": "vlp_models.models.convert.vlmo_images:read_timm_weights",
    },
)
