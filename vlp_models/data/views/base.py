"""A view: one kind of row that a model can read. Each is one record in a file of its own; all else follows from it.

The record defines its canonical table (tables.py), what `validate` checks in every row (curation/validation/), the
columns of the shards' index (shards/write.py), the content of a `Sample`, and which texts go into the vocabulary
(pipeline/stages/tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Type = Literal["string", "bool", "int32", "strings", "boxes"]  # of a column; the last two are lists


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
    type: Type
    required: bool = False
    values: tuple[str, ...] = ()
    words: bool = False
    slices: bool = False
    indexed: bool = True

    @property
    def is_list(self) -> bool:
        return self.type in ("strings", "boxes")

    @property
    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa  # here: a model is loaded and served without Arrow

        if self.type == "strings":
            return pa.list_(pa.string())
        if self.type == "boxes":
            return pa.list_(pa.list_(pa.float32()))
        return pa.type_for_alias(self.type)

    def texts(self, rows: pa.Table) -> list[str]:
        """Return the texts of this column in these rows."""
        values: list[Any] = rows[self.name].to_pylist()
        # A list column has several texts per row.
        return [text for several in values for text in several] if self.is_list else values


# ids of the images after the first, in order, for views with several images per row
OTHER_IMAGES = Column(name="other_image_ids", type="strings")


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
        return {c.name: () if c.is_list else None for c in self.indexed if c.name != "text"}

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the canonical table."""
        import pyarrow as pa

        image = [("image_id", pa.string())] if self.has_image else []
        columns = [(column.name, column.arrow_type) for column in self.columns]
        return pa.schema([(self.id_column, pa.string()), *image, *columns, ("provenance", pa.string())])

    def index_row(self, row: Mapping[str, Any], width: int, height: int) -> Row:
        """Return the index row of a row of the table, with its id under `sample_id`."""
        # columns that depend on the image's size, such as boxes
        changed = self.to_index(row, width, height) if self.to_index else {}
        # Changed columns come last and replace these.
        unchanged = {column.name: row[column.name] for column in self.indexed}
        return {"sample_id": row[self.id_column], **unchanged, **changed}

    @property
    def text_columns(self) -> tuple[Column, ...]:
        """Return the columns with texts for the vocabulary."""
        return tuple(column for column in self.columns if column.name == "text" or column.words)


TEXT = Column(name="text", type="string", required=True)
