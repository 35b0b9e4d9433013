"""Hypotheses about an image: entailed, neutral or contradicted."""

from __future__ import annotations

from vlp_models.data.views.base import TEXT, Column, View

ENTAILMENT = ("entailment", "neutral", "contradiction")
VIEW = View(
    name="hypotheses",
    id_column="hypothesis_id",
    columns=(
        TEXT,
        Column(name="gold_label", type="string", values=ENTAILMENT, slices=True),  # null if hidden
        Column(name="annotator_labels", type="strings"),  # of one to five people
    ),
)
