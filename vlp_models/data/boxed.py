"""The images with boxes, and nothing else: what a detector learns from.

Pictures without boxes, captions, or where a row was read from leave this table as it is, and so what depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.errors import DataError

FILE = "boxed.parquet"
OBJECT = ("category", "x1", "y1", "x2", "y2", "attributes")  # of a row of `objects`
IMAGE = ("image_id", "source", "split", "path", "width", "height", "sha256")  # of a row of `images`


def write_boxed(images: pa.Table, objects: pa.Table, directory: Path) -> Path:
    """Writes boxed.parquet: a row an image with a box, in the order of ids; its objects as in their table.

    Args:
        images, objects: validated tables (data/tables.py).
    """
    of_image: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in objects.select(["image_id", *OBJECT]).to_pylist():
        of_image[row.pop("image_id")].append(row)
    columns = images.select(list(IMAGE)).sort_by("image_id")
    rows = [row | {"objects": of_image[row["image_id"]]} for row in columns.to_pylist() if row["image_id"] in of_image]
    kinds = pa.struct([objects.schema.field(name) for name in OBJECT])
    schema = pa.schema([*(images.schema.field(name) for name in IMAGE), ("objects", pa.list_(kinds))])
    path = directory / FILE
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
    return path


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
