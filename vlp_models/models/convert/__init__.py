"""Weights of other programs that a model starts from, and who reads them: contrib/public_weights, and plugins.

A reader gets a source and a `mapping.ImportRequest`, and returns a `mapping.ImportedModel`.
"""

from __future__ import annotations

from vlp_models.common.plugins import Table

# text_init: a BERT's folder, image_init: timm's weights -> module:function(source, ImportRequest) -> ImportedModel
WEIGHTS = Table("weights", {})

# family -> module:function(state, config.json of the BERT, the family's config) -> public_weights.bert.ConvertedBert
READERS = Table("text_readers", {})

# family -> module:function(source, mapping.ImportRequest) -> mapping.ImportedModel, for timm's weights
IMAGE_READERS = Table("image_readers", {})
