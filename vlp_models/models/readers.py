"""Who puts a BERT's weights where a family has a place for them (models/bert.py)."""

# family -> module:function, called with a file's tensors, BERT's config.json and the family's config; gives `Converted`
READERS: dict[str, str] = {
    "tden": "vlp_models.models.tden.convert_bert:convert_bert",
    "unified_vlp": "vlp_models.models.unified_vlp.convert_bert:convert_bert",
    "xgpt": "vlp_models.models.xgpt.convert_bert:convert_bert",
    "vlmo": "vlp_models.models.vlmo.convert_bert:convert_bert",
    "soho": "vlp_models.models.soho.convert_bert:convert_bert",
}
