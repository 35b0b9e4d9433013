"""The views of the data: what a model can be given a row of. One record each, and everything else follows from it.

From a record follow its canonical table (tables.py), what `validate` asks of every row (validation/), the columns of
the shards' index (shards.py), what a `Sample` of it holds, and whose words make the vocabulary (stages/tokenizer.py).
A new view is one record here, a reader that fills its table (formats/), and the rules that only it needs.
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
    values    the only ones it may have, where they are listed; null stays possible where it is not required
    words     it holds text: its words are learnt by the vocabulary (`text` always does)
    slices    its values are slices of a test set, by which a gate may ask for floors
    indexed   it stands in the shards' index, and in a sample
    """

    name: str
    type: pa.DataType
    required: bool = False
    values: tuple[str, ...] = ()
    words: bool = False
    slices: bool = False
    indexed: bool = True


# the ids of the images behind the first, in order: of views whose rows speak of several
OTHER_IMAGES = Column(name="other_image_ids", type=pa.list_(pa.string()))


@dataclass(frozen=True, kw_only=True)
class View:
    """
    table      of the same name as the view; False: its rows are made of other tables' (images)
    id_column  of the table
    images     of how many images a row speaks: of one, `image_id`; of several, of which `image_id` is the first and the
               column OTHER_IMAGES names the rest, in order; or of none
    columns    besides the id, `image_id` and `provenance`
    to_index   a row of the table, the image's width and height in pixels -> the indexed columns that change
    """

    name: str
    id_column: str
    columns: tuple[Column, ...]
    table: bool = True
    images: Literal["one", "several", "none"] = "one"
    to_index: Callable[[Mapping[str, Any], int, int], Row] | None = None

    def __post_init__(self) -> None:
        if (OTHER_IMAGES in self.columns) != (self.images == "several"):
            raise ValueError(f"the view {self.name}: several images are those of the column OTHER_IMAGES")

    @property
    def indexed(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.indexed)

    @property
    def has_image(self) -> bool:
        return self.images != "none"

    @property
    def has_text(self) -> bool:
        """Whether a sample has a text of its own; a view without one can be learnt from by images alone."""
        return any(column.name == "text" for column in self.columns)

    @property
    def nothing(self) -> Row:
        """A sample's values where all is hidden, as at serving."""
        return {c.name: () if pa.types.is_list(c.type) else None for c in self.indexed if c.name != "text"}

    @property
    def schema(self) -> pa.Schema:
        """Of the canonical table."""
        image = [("image_id", pa.string())] if self.has_image else []
        columns = [(column.name, column.type) for column in self.columns]
        return pa.schema([(self.id_column, pa.string()), *image, *columns, ("provenance", pa.string())])

    def index_row(self, row: Mapping[str, Any], width: int, height: int) -> Row:
        """What the index holds of a row of the table, its id under `sample_id`."""
        changed = self.to_index(row, width, height) if self.to_index else {}
        kept = {column.name: row[column.name] for column in self.indexed}
        return {"sample_id": row[self.id_column], **kept, **changed}

    def texts(self, rows: pa.Table) -> list[str]:
        """Every text of these rows, for the vocabulary."""
        found: list[str] = []
        for column in self.columns:
            if column.name == "text" or column.words:
                values = rows[column.name].to_pylist()
                found += [text for several in values for text in several] if pa.types.is_list(column.type) else values
        return found


TEXT = Column(name="text", type=pa.string(), required=True)


def _fractions(row: Mapping[str, Any], width: int, height: int) -> Row:
    """Boxes in pixels become fractions of width and height, cut off at the image's edges."""
    size = (width, height) * 2
    return {
        "boxes": [
            [round(min(max(v / s, 0.0), 1.0), 6) for v, s in zip(box, size, strict=True)] for box in row["boxes"] or []
        ]
    }


_ALL = (
    # every image once, with its reference captions, which the index gathers: pretraining on images alone, captioning
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
            Column(name="answers", type=pa.list_(pa.string())),  # ten annotators, or the one right; empty: hidden
        ),
    ),
    View(
        name="statements",
        id_column="statement_id",
        columns=(
            TEXT,
            Column(name="label", type=pa.bool_()),  # null where hidden
            # the sentence's id: NLVR's consistency is counted over it
            Column(name="group", type=pa.string(), required=True),
        ),
    ),
    View(
        name="choices",
        id_column="choice_id",
        columns=(
            TEXT,  # the question, objects written out as names
            Column(name="answers", type=pa.list_(pa.string()), words=True),  # four
            Column(name="answer_label", type=pa.int32()),  # the right one's place, from 0; null where hidden
            Column(name="rationales", type=pa.list_(pa.string()), words=True),  # four, for the right answer
            Column(name="rationale_label", type=pa.int32()),
            # the image's objects; those of question and answers first
            Column(name="boxes", type=pa.list_(pa.list_(pa.float32()))),
        ),
        to_index=_fractions,
    ),
    View(
        name="hypotheses",
        id_column="hypothesis_id",
        columns=(
            TEXT,
            Column(name="gold_label", type=pa.string(), values=ENTAILMENT, slices=True),  # null where hidden
            Column(name="annotator_labels", type=pa.list_(pa.string())),  # of one to five people
        ),
    ),
    # statements about two images: the left one first
    View(
        name="image_pairs",
        id_column="pair_id",
        images="several",
        columns=(
            OTHER_IMAGES,
            TEXT,
            Column(name="label", type=pa.bool_()),  # null where hidden
            # the sentence's id: NLVR2's consistency is counted over it
            Column(name="group", type=pa.string(), required=True),
        ),
    ),
    # sentences that no image belongs to, for pretraining on text alone
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
    """The columns that views fill in the shards' index, `text` first.

    Raises:
        ValueError: two views give one name different types; the index is one table, so one must go by another name.
    """
    found: dict[str, pa.DataType] = {"text": pa.string()}
    for view in VIEWS.values():
        for column in view.indexed:
            if found.setdefault(column.name, column.type) != column.type:
                raise ValueError(f"the column `{column.name}` of the view {view.name} is of another type elsewhere")
    return found
