"""Sentences without an image, for pretraining on text alone."""

from __future__ import annotations

from vlp_models.data.views.base import TEXT, Column, View

VIEW = View(
    name="texts",
    id_column="text_id",
    images="none",
    columns=(
        Column(name="source", type="string", required=True, indexed=False),
        Column(name="split", type="string", required=True, indexed=False),
        TEXT,
    ),
)
