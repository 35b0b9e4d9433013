"""The canonical tables: the one form every public format is read into.

Ids are strings and carry their dataset's name (`scenes/17`), so tables of several datasets can be stacked.
`provenance` names the file and the line or record a row came from. Boxes are pixels, x1 y1 x2 y2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.data.views import TABLES

SPLITS = ("train", "val", "test")

SCHEMAS: dict[str, pa.Schema] = {
    "images": pa.schema(
        [
            ("image_id", pa.string()),
            ("source", pa.string()),
            ("split", pa.string()),
            ("path", pa.string()),  # relative to the project's root where it lies inside it, else absolute
            ("width", pa.int32()),
            ("height", pa.int32()),
            ("sha256", pa.string()),
            ("provenance", pa.string()),
        ]
    ),
    **{name: view.schema for name, view in TABLES.items()},
    "objects": pa.schema(
        [
            ("object_id", pa.string()),
            ("image_id", pa.string()),
            ("category", pa.string()),
            ("x1", pa.float32()),
            ("y1", pa.float32()),
            ("x2", pa.float32()),
            ("y2", pa.float32()),
            ("attributes", pa.list_(pa.string())),  # words that hold of it besides its category's; null where unknown
            ("provenance", pa.string()),
        ]
    ),
    "quarantine": pa.schema(
        [
            ("table", pa.string()),
            ("row_id", pa.string()),
            ("rule", pa.string()),
            ("reason", pa.string()),
            ("provenance", pa.string()),
        ]
    ),
}
ID_COLUMN = {
    "images": "image_id",
    **{name: view.id_column for name, view in TABLES.items()},
    "objects": "object_id",
}


def write_table(rows: list[dict[str, object]], name: str, directory: Path) -> Path:
    """Writes rows as `<name>.parquet`; the same rows give the same bytes."""
    path = directory / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[name]), path, compression="zstd")
    return path


def read_table(name: str, directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads `<name>.parquet`, or some of its columns; an absent table is an empty one."""
    path = directory / f"{name}.parquet"
    if not path.exists():
        empty = SCHEMAS[name].empty_table()
        return empty if columns is None else empty.select(list(columns))
    return pq.read_table(path, schema=SCHEMAS[name], columns=columns)


def object_words(row: Mapping[str, Any]) -> list[str]:
    """The words that hold of a row of `objects`: its category's and its attributes."""
    return [*row["category"].split(), *(row.get("attributes") or [])]
