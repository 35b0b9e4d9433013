"""Questions about an image, with their answers."""

from __future__ import annotations

from vlp_models.data.views.base import TEXT, Column, View

VIEW = View(
    name="questions",
    id_column="question_id",
    columns=(
        TEXT,
        Column(name="question_type", type="string", slices=True),
        Column(name="answer_type", type="string", values=("yes/no", "number", "other", ""), slices=True),
        Column(name="answers", type="strings"),  # of ten annotators, or the one right answer; empty: hidden
    ),
)
