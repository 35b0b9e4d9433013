"""Who puts others' weights where a family has a place for them: a BERT's (bert.py), timm's (pretrained_timm.py)."""

# family -> module:function, called with a file's tensors, BERT's config.json and the family's config; gives `Converted`
READERS: dict[str, str] = {
    "tden": "vlp_models.models.tden.convert_bert:convert_bert",
    "unified_vlp": "vlp_models.models.unified_vlp.convert_bert:convert_bert",
    "xgpt": "vlp_models.models.xgpt.convert_bert:convert_bert",
    "vlmo": "vlp_models.models.vlmo.convert_bert:convert_bert",
    "soho": "vlp_models.models.soho.convert_bert:convert_bert",
}

# family -> module:function, called with the source of timm's weights and `models.foreign.Asked`; gives `Imported`
IMAGE_READERS: dict[str, str] = {
    "soho": "vlp_models.models.soho.convert_parts:read_timm_backbone",
    "vlmo": "vlp_models.models.vlmo.timm_image_side:read_timm_image_side",
}
