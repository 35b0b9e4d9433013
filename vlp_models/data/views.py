"""The views of the data: what a model can get one row of. Each view is one record, and all else follows from it.

The record defines its canonical table (tables.py), what `validate` checks in every row (curation/validation/), the
columns of the shards' index (shards/write.py), the content of a `Sample`, and which texts go into the vocabulary
(pipeline/stages/tokenizer.py). A new view is one record here, a reader that fills its table (data/formats/), and the
rules that only it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

Row = dict[str, Any]
ENTAILMENT = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a view's table.

    required  `validate` refuses a row without it
    values    allowed values, if listed; null is allowed too unless it is required
    words     it is text that goes into the vocabulary (`text` always does)
    slices    its values are slices of a test set, which a promotion gate may set minimum scores for
    indexed   it is in the shards' index, and in a sample
    """

    name: str
    type: pa.DataType
    required: bool = False
    values: tuple[str, ...] = ()
    words: bool = False
    slices: bool = False
    indexed: bool = True


# ids of the images after the first, in order, for views with several images per row
OTHER_IMAGES = Column(name="other_image_ids", type=pa.list_(pa.string()))


@dataclass(frozen=True, kw_only=True)
class View:
    """One view.

    table      it has a table of its name; False: its rows are made from other tables (images)
    id_column  of the table
    images     number of images per row: one, `image_id`; several, `image_id` is the first and the column OTHER_IMAGES
               has the others in order; or none
    columns    in addition to the id, `image_id` and `provenance`
    to_index   (row of the table, image width and height in pixels) -> indexed columns that change
    """

    name: str
    id_column: str
    columns: tuple[Column, ...]
    table: bool = True
    images: Literal["one", "several", "none"] = "one"
    to_index: Callable[[Mapping[str, Any], int, int], Row] | None = None

    def __post_init__(self) -> None:
        if (OTHER_IMAGES in self.columns) != (self.images == "several"):
            raise ValueError(f"the view {self.name}: `images: several` requires the column OTHER_IMAGES, and only then")

    @property
    def indexed(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.indexed)

    @property
    def has_image(self) -> bool:
        return self.images != "none"

    @property
    def has_text(self) -> bool:
        """Return whether a sample has a text of its own; a view without one can train an image-only model."""
        return any(column.name == "text" for column in self.columns)

    @property
    def hidden_values(self) -> Row:
        """Return a sample's values if everything is hidden, as in serving."""
        return {c.name: () if pa.types.is_list(c.type) else None for c in self.indexed if c.name != "text"}

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the canonical table."""
        image = [("image_id", pa.string())] if self.has_image else []
        columns = [(column.name, column.type) for column in self.columns]
        return pa.schema([(self.id_column, pa.string()), *image, *columns, ("provenance", pa.string())])

    def index_row(self, row: Mapping[str, Any], width: int, height: int) -> Row:
        """Return the index row of a row of the table, with its id under `sample_id`."""
        changed = self.to_index(row, width, height) if self.to_index else {}
        kept = {column.name: row[column.name] for column in self.indexed}
        return {"sample_id": row[self.id_column], **kept, **changed}

    def texts(self, rows: pa.Table) -> list[str]:
        """Return all texts of these rows, for the vocabulary."""
        found: list[str] = []
        for column in self.columns:
            if column.name == "text" or column.words:
                values = rows[column.name].to_pylist()
                found += [text for several in values for text in several] if pa.types.is_list(column.type) else values
        return found


TEXT = Column(name="text", type=pa.string(), required=True)
STATEMENT = (
    TEXT,
    Column(name="label", type=pa.bool_()),  # null if hidden
    # id of the sentence: NLVR's and NLVR2's consistency is counted per group
    Column(name="group", type=pa.string(), required=True),
)


def _scale_boxes(row: Mapping[str, Any], width: int, height: int) -> Row:
    """Convert boxes from pixels to fractions of width and height, clipped to the image."""
    size = (width, height) * 2
    return {
        "boxes": [
            [round(min(max(v / s, 0.0), 1.0), 6) for v, s in zip(box, size, strict=True)] for box in row["boxes"] or []
        ]
    }


_ALL = (
    # every image once, with its reference captions, which the index collects: for image-only pretraining, captioning
    # and retrieval
    View(
        name="images",
        id_column="image_id",
        table=False,
        columns=(Column(name="captions", type=pa.list_(pa.string())),),
    ),
    View(name="captions", id_column="caption_id", columns=(TEXT,)),
    View(
        name="questions",
        id_column="question_id",
        columns=(
            TEXT,
            Column(name="question_type", type=pa.string(), slices=True),
            Column(name="answer_type", type=pa.string(), values=("yes/no", "number", "other", ""), slices=True),
            Column(
                name="answers", type=pa.list_(pa.string())
            ),  # of ten annotators, or the one right answer; empty: hidden
        ),
    ),
    View(
        name="statements",
        id_column="statement_id",
        columns=STATEMENT,
    ),
    View(
        name="choices",
        id_column="choice_id",
        columns=(
            TEXT,  # the question, with names for objects
            Column(name="answers", type=pa.list_(pa.string()), words=True),  # four
            Column(name="answer_label", type=pa.int32()),  # index of the right one; null if hidden
            Column(name="rationales", type=pa.list_(pa.string()), words=True),  # four, for the right answer
            Column(name="rationale_label", type=pa.int32()),
            # the image's objects; those of question and answers first
            Column(name="boxes", type=pa.list_(pa.list_(pa.float32()))),
        ),
        to_index=_scale_boxes,
    ),
    View(
        name="hypotheses",
        id_column="hypothesis_id",
        columns=(
            TEXT,
            Column(name="gold_label", type=pa.string(), values=ENTAILMENT, slices=True),  # null if hidden
            Column(name="annotator_labels", type=pa.list_(pa.string())),  # of one to five people
        ),
    ),
    # statements about two images, the left one first
    View(
        name="image_pairs",
        id_column="pair_id",
        images="several",
        columns=(OTHER_IMAGES, *STATEMENT),
    ),
    # sentences without an image, for pretraining on text alone
    View(
        name="texts",
        id_column="text_id",
        images="none",
        columns=(
            Column(name="source", type=pa.string(), required=True, indexed=False),
            Column(name="split", type=pa.string(), required=True, indexed=False),
            TEXT,
        ),
    ),
)
VIEWS: dict[str, View] = {view.name: view for view in _ALL}
TABLES: dict[str, View] = {view.name: view for view in _ALL if view.table}


def index_columns() -> dict[str, pa.DataType]:
    """Return the columns of all views in the shards' index, `text` first.

    Raises:
        ValueError: two views have columns of the same name and different types; one must be renamed.
    """
    found: dict[str, pa.DataType] = {"text": pa.string()}
    for view in VIEWS.values():
        for column in view.indexed:
            if found.setdefault(column.name, column.type) != column.type:
                raise ValueError(f"the column `{column.name}` of the view {view.name} has another type in another view")
    return found
