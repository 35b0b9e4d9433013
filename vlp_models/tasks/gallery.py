"""What a task shows in the report: cards with a picture, what the model said of it, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table

WIDE = 400  # pixels of a wide picture's longer side
Row = dict[str, Any]


class PictureSource(Protocol):
    """Pictures by image id, for the page (report/pictures.py)."""

    def get(self, image_id: str, longest: int = ...) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """about: what the cards show, as it follows "Run ..., split ...; ". wide: for pictures that are."""

    title: str
    about: str
    wide: bool = False
    every: bool = False  # a card takes little room: all of `evaluate.gallery` are shown, not half of them


@dataclass(frozen=True, kw_only=True)
class Line:
    """right: a tick or a cross before the text; None: neither. after: said softly behind it."""

    text: str
    right: bool | None = None
    strong: bool = False
    soft: bool = False
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """beside: a second picture, of what is about two. bars: answers with their probabilities. more: what unfolds on a
    click, lines or another picture."""

    picture: Any
    beside: Any = None
    lines: Sequence[Line]
    bars: Sequence[tuple[str, float]] = ()
    below: Sequence[Line] = ()
    summary: str = ""
    more: Sequence[Line] = ()
    other: Any = None


def rows_of_images(table: str, workspace: Workspace, predictions: Sequence[Any]) -> dict[str, list[Row]]:
    """The table's rows of the predictions' images, by image id."""
    rows = read_table(table, workspace.validated)
    wanted = pa.array(sorted({row["image_id"] for row in predictions}), pa.string())
    result: dict[str, list[Row]] = {}
    for row in rows.filter(pc.is_in(rows["image_id"], value_set=wanted)).to_pylist():
        result.setdefault(row["image_id"], []).append(row)
    return result


def rows_by_id(table: str, key: str, workspace: Workspace, predictions: Sequence[Any]) -> dict[str, Row]:
    return {row[key]: row for rows in rows_of_images(table, workspace, predictions).values() for row in rows}
