"""The images with boxes, and nothing else: what a detector learns from.

Pictures without boxes, captions, or where a row was read from leave this table as it is, and so what depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.data.outofcore import Database
from vlp_models.data.tables import HELD, SCHEMAS, TableWriter, read_batches
from vlp_models.errors import DataError

FILE = "boxed.parquet"
OBJECT = ("category", "x1", "y1", "x2", "y2", "attributes")  # of a row of `objects`
IMAGE = ("image_id", "source", "split", "path", "width", "height", "sha256")  # of a row of `images`


def write_boxed(directory: Path) -> Path:
    """Writes boxed.parquet beside the validated tables in `directory`: a row an image with a box, in the order of ids;
    its objects as in their table."""
    kinds = pa.struct([SCHEMAS["objects"].field(name) for name in OBJECT])
    schema = pa.schema([*(SCHEMAS["images"].field(name) for name in IMAGE), ("objects", pa.list_(kinds))])
    with TableWriter(FILE.removesuffix(".parquet"), directory, schema) as writer:
        objects = directory / "objects.parquet"
        if objects.exists() and pq.read_metadata(objects).num_rows:
            for _, rows in groupby(_objects(directory), key=itemgetter("image_id")):
                first, *others = rows
                writer.append(
                    {name: first[name] for name in IMAGE}
                    | {"objects": [{name: row[f"of_{name}"] for name in OBJECT} for row in (first, *others)]}
                )
    return writer.path


def _objects(directory: Path) -> Iterator[dict[str, Any]]:
    """The objects with their image's columns; theirs under `of_...`."""
    with Database.within(directory) as database:
        for table, columns in (("images", IMAGE), ("objects", ("image_id", *OBJECT))):
            schema = pa.schema([*(SCHEMAS[table].field(name) for name in columns), pa.field("row", pa.int64())])
            database.load(table, _numbered(directory / f"{table}.parquet", list(columns)), schema)
        chosen = [*(f"i.{name}" for name in IMAGE), *(f"o.{name} AS of_{name}" for name in OBJECT)]
        joined = "FROM objects o JOIN images i ON o.image_id = i.image_id ORDER BY i.image_id, o.row"
        for piece in database.stream(f"SELECT {', '.join(chosen)} {joined}"):
            yield from piece.to_pylist()


def _numbered(path: Path, columns: list[str]) -> Iterator[pa.Table]:
    start = 0
    for rows in read_batches([path], HELD, columns):
        yield rows.append_column("row", pa.array(range(start, start + len(rows)), pa.int64()))
        start += len(rows)


def read_boxed(directory: Path) -> list[dict[str, Any]]:
    """The rows: an image's columns, and `objects`, a list of its own.

    Raises:
        DataError: there is none, or a damaged one.
    """
    path = directory / FILE
    try:
        return list(pq.read_table(path).to_pylist())
    except FileNotFoundError:
        raise DataError(f"{path}: not there yet; `dvc repro validate` makes it") from None
    except pa.ArrowException as error:
        raise DataError(f"{path}: damaged ({error}); `dvc repro validate` makes it anew") from None
