"""Every image once, with its reference captions: for image-only pretraining, captioning and retrieval."""

from __future__ import annotations

from vlp_models.data.views.base import Column, View

# It has no table: the index collects the captions.
VIEW = View(
    name="images",
    id_column="image_id",
    table=False,
    columns=(Column(name="captions", type="strings"),),
)
