"""Questions with four answers and four rationales each; one of each is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlp_models.data.views.base import TEXT, Column, Row, View


def scale_boxes(row: Mapping[str, Any], width: int, height: int) -> Row:
    """Convert boxes from pixels to fractions of width and height, clipped to the image."""
    sides = (width, height) * 2  # of x1, y1, x2, y2
    boxes = []
    for box in row["boxes"] or []:
        fractions = [value / side for value, side in zip(box, sides, strict=True)]
        boxes.append([round(min(max(fraction, 0.0), 1.0), 6) for fraction in fractions])
    return {"boxes": boxes}


VIEW = View(
    name="choices",
    id_column="choice_id",
    columns=(
        TEXT,  # the question, with names for objects
        Column(name="answers", type="strings", words=True),  # four
        Column(name="answer_label", type="int32"),  # index of the right one; null if hidden
        Column(name="rationales", type="strings", words=True),  # four, for the right answer
        Column(name="rationale_label", type="int32"),
        # the image's objects; those of question and answers first
        Column(name="boxes", type="boxes"),
    ),
    to_index=scale_boxes,
)
