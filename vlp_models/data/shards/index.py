"""The rows of one view in the shards' index, of which memory holds only what is looked at.

A large index is written out once as uncompressed Arrow beside the shards' folder, and mapped: processes and workers
share its pages, and the system drops them when it needs the memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vlp_models.data.shards.archive import BLOCK, KEY
from vlp_models.data.shards.write import INDEX_SCHEMA, PLACE_COLUMNS
from vlp_models.data.tables import open_parquet
from vlp_models.data.views import View
from vlp_models.errors import DataError

PIECE = 65_536  # rows
MAPPED = 200_000  # rows of an index from which on it is mapped


class Index:
    """Rows by their number. `pieces`: all but the last have `PIECE` rows."""

    def __init__(self, table: pa.Table) -> None:
        self.pieces: list[pa.RecordBatch] = table.to_batches()
        self.schema = table.schema
        self._length = len(table)

    def __len__(self) -> int:
        return self._length

    def take(self, numbers: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
        """These rows, in this order."""
        wanted = np.asarray(numbers, np.int64)
        found: list[dict[str, Any]] = [{}] * len(wanted)
        for piece in np.unique(wanted // PIECE):
            places = np.flatnonzero(wanted // PIECE == piece)
            rows = self.pieces[piece].take(pa.array(wanted[places] % PIECE)).to_pylist()
            for place, row in zip(places, rows, strict=True):
                found[place] = row
        return found

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([piece[name] for piece in self.pieces], self.schema.field(name).type)

    def where(self, condition: pc.Expression) -> NDArray[np.int64]:
        """The numbers of the rows for which it holds."""
        found = [np.zeros(0, np.int64)]
        for number, piece in enumerate(self.pieces):
            rows = pa.table({"row": np.arange(len(piece)), **dict(zip(piece.schema.names, piece.columns, strict=True))})
            found.append(rows.filter(condition)["row"].to_numpy() + number * PIECE)
        return np.concatenate(found)


def read_index(file: Path, view: View) -> Index:
    """
    Raises:
        DataError: there is none, or a damaged one.
    """
    columns = [*PLACE_COLUMNS, *(column.name for column in view.indexed)]
    try:
        if pq.read_metadata(file).num_rows >= MAPPED:
            with contextlib.suppress(OSError):  # a folder that can't be written to, or is full: the rows are held
                return Index(_mapped(file, view, columns))
        rows = pq.read_table(file, schema=INDEX_SCHEMA, columns=columns, filters=[("view", "=", view.name)])
        rows = rows.combine_chunks()
        check_index(rows)
        return Index(_in_pieces(rows))
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; the shards have no split of this name, or are not built yet") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: not an index of shards: {error}; `dvc repro shards` makes it anew") from None


def _in_pieces(rows: pa.Table) -> pa.Table:
    return pa.Table.from_batches(rows.combine_chunks().to_batches(max_chunksize=PIECE), rows.schema)


def _mapped(file: Path, view: View, columns: list[str]) -> pa.Table:
    """The view's rows in a file of their own, for as long as the index stays as it is."""
    found = file.stat()
    folder = file.parent.with_name(f".{file.parent.name}-mapped")
    path = folder / f"{file.stem}-{view.name}-{found.st_size:x}-{found.st_mtime_ns:x}.arrow"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        schema = pa.schema([INDEX_SCHEMA.field(name) for name in columns])
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for piece in _pieces(file, view, columns):
                    rows = piece.cast(schema)
                    check_index(pa.Table.from_batches([rows]))
                    writer.write_batch(rows)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for other in folder.glob(f"{file.stem}-{view.name}-*.arrow"):  # of an index that is no more
            if other != path:
                with contextlib.suppress(FileNotFoundError):
                    other.unlink()
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _pieces(file: Path, view: View, columns: list[str]) -> Iterator[pa.RecordBatch]:
    held, count = [], 0
    with open_parquet(file) as parquet:
        for batch in parquet.iter_batches(batch_size=PIECE, columns=["view", *columns]):
            rows = pa.Table.from_batches([batch]).filter(pc.field("view") == view.name).select(columns)
            held.append(rows)
            count += len(rows)
            while count >= PIECE:
                table = pa.concat_tables(held)
                yield table.slice(0, PIECE).combine_chunks().to_batches()[0]
                held, count = [table.slice(PIECE)], count - PIECE
    if count:
        yield pa.concat_tables(held).combine_chunks().to_batches()[0]


KINDS = ("regions", "pixels")


def check_index(table: pa.Table) -> None:
    """
    Args:
        table: rows of the index with the columns that say where the image lies (`PLACE_COLUMNS`).

    Raises:
        ValueError: says which column can't be, and in which row.
    """
    table.validate(full=True)  # offsets of strings and lists, UTF-8
    places = [f"{kind}_{what}" for kind in KINDS for what in ("offset", "size")]
    for name in ("sample_id", "image_id", "source", "shard", "key", "pixels_extension", *places):
        if table[name].null_count:
            raise ValueError(f"row {_first(pc.is_null(table[name]))}: no `{name}`")
    _refuse(table, "shard", pc.less(table["shard"], -1), "is no shard's number")
    _refuse(table, "key", pc.invert(pc.match_substring_regex(table["key"], f"^{KEY}*$")), "is no member's name")
    known = pc.is_in(table["pixels_extension"], value_set=pa.array(["", "png", "jpg"]))
    _refuse(table, "pixels_extension", pc.invert(known), "is none of png, jpg")
    for kind in KINDS:
        offset, size = table[f"{kind}_offset"], table[f"{kind}_size"]
        _refuse(table, f"{kind}_size", pc.less(size, 0), "is negative")
        before = pc.and_(pc.greater(size, 0), pc.less(offset, BLOCK))
        _refuse(table, f"{kind}_offset", before, "is before the first member")


def _refuse(table: pa.Table, column: str, bad: pa.ChunkedArray, why: str) -> None:
    if pc.any(bad).as_py():
        row = _first(bad)
        raise ValueError(f"row {row}: `{column}` {str(table[column][row])[:60]!r} {why}")


def _first(bad: pa.ChunkedArray) -> int:
    found: int = pc.index(bad, True).as_py()
    return found
