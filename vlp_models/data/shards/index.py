"""The rows of one view in the shards' index. Memory holds only what is read.

A large index is memory-mapped (mapped.py). Every index is checked before a sample is read; the location of images
is checked again in the tar itself (archive.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vlp_models.data.mapped import PIECE, is_mapped, map_rows
from vlp_models.data.shards.archive import BLOCK, KEY
from vlp_models.data.shards.write import LOCATION_COLUMNS, view_schema
from vlp_models.data.tables import read_batches
from vlp_models.data.views import View
from vlp_models.errors import DataError


class Index:
    """Rows by number. `pieces`: all but the last have `PIECE` rows."""

    def __init__(self, table: pa.Table) -> None:
        self.pieces: list[pa.RecordBatch] = table.to_batches()
        self.schema = table.schema
        self._length = len(table)

    def __len__(self) -> int:
        return self._length

    def take(self, numbers: Sequence[int] | NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return these rows in this order."""
        row_numbers = np.asarray(numbers, np.int64)
        # Rows are read piece by piece, then put where they were requested.
        rows: list[dict[str, Any]] = [{}] * len(row_numbers)
        for piece, positions in self._by_piece(row_numbers):
            piece_rows = self.pieces[piece].take(pa.array(row_numbers[positions] % PIECE)).to_pylist()
            for position, row in zip(positions, piece_rows, strict=True):
                rows[position] = row
        return rows

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([piece[name] for piece in self.pieces], self.schema.field(name).type)

    def values(self, name: str, rows: NDArray[np.integer]) -> NDArray[Any]:
        """Return the values of a column of integers (as int64) or of strings in these rows."""
        is_integer = pa.types.is_integer(self.schema.field(name).type)
        # Each value lands at the position of its row number.
        values = np.empty(len(rows), np.int64 if is_integer else object)
        for piece, positions in self._by_piece(rows):
            piece_values = self.pieces[piece][name].take(pa.array(rows[positions] % PIECE))
            values[positions] = piece_values.to_numpy(zero_copy_only=False)
        return values

    @staticmethod
    def _by_piece(rows: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each piece that has some of these rows, and their positions in `rows`."""
        pieces = rows // PIECE
        for piece in np.unique(pieces):
            yield int(piece), np.flatnonzero(pieces == piece)

    def where(self, condition: pc.Expression) -> NDArray[np.uint32]:
        """Return the numbers of the rows for which the condition is true."""
        matches = [np.zeros(0, np.uint32)]
        for number, piece in enumerate(self.pieces):
            columns = dict(zip(piece.schema.names, piece.columns, strict=True))
            # A column `row` keeps the numbers, which the filter would lose.
            rows = pa.table({"row": np.arange(len(piece)), **columns})
            matches.append((rows.filter(condition)["row"].to_numpy() + number * PIECE).astype(np.uint32))
        return np.concatenate(matches)

    def first_rows(self) -> NDArray[np.uint32]:
        """Return the first row of each row's image."""
        first = np.empty(len(self), np.uint32)
        last, begin = None, 0
        for number, piece in enumerate(self.pieces):
            ids, start = piece["image_id"], number * PIECE
            # rows that are not sorted by image need a look-up of all ids
            if last is not None and ids[0].as_py() < last:
                return self._first_rows_of_any_order()
            if pc.any(pc.less(ids[1:], ids[:-1])).as_py():
                return self._first_rows_of_any_order()
            # bool [rows of the piece]: the first row of an image; the first image may continue the last piece's
            begins = np.empty(len(ids), bool)
            begins[0] = ids[0].as_py() != last
            begins[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
            # row numbers grow, so the largest so far is the first row of the current image
            rows = np.where(begins, np.arange(start, start + len(ids)), begin)
            first[start : start + len(ids)] = np.maximum.accumulate(rows)
            last, begin = ids[-1].as_py(), int(first[start + len(ids) - 1])
        return first

    def _first_rows_of_any_order(self) -> NDArray[np.uint32]:
        """As `first_rows`, where the rows are not in the order of their images; holds every image's id."""
        first: dict[str, int] = {}
        ids = (name.as_py() for piece in self.pieces for name in piece["image_id"])
        return np.fromiter((first.setdefault(name, row) for row, name in enumerate(ids)), np.uint32, len(self))


def read_index(file: Path, view: View) -> Index:
    """Read the rows of one view.

    Raises:
        DataError: no index, or a damaged one.
    """
    columns = [*LOCATION_COLUMNS, *(column.name for column in view.indexed)]
    try:
        # a large index is mapped, a small one read
        if is_mapped(file, f"{file.stem}-{view.name}"):
            with contextlib.suppress(OSError):  # folder not writable or full: keep the rows in memory
                return Index(_map_rows(file, view, columns))
        rows = pq.read_table(file, schema=view_schema(view), columns=columns, filters=[("view", "=", view.name)])
        rows = rows.combine_chunks()
        check_index(rows)
        pieces = rows.combine_chunks().to_batches(max_chunksize=PIECE)
        return Index(pa.Table.from_batches(pieces, rows.schema))
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; the shards have no such split, or are not built yet") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: not an index of shards: {error}; run `dvc repro shards`") from None


def _map_rows(file: Path, view: View, columns: list[str]) -> pa.Table:
    """Map a file with the view's rows, which is valid as long as the index does not change."""
    # the index has the columns of all views: map this view's alone
    schema = pa.schema([view_schema(view).field(name) for name in columns])

    def write(writer: pa.ipc.RecordBatchWriter, _folder: Path) -> None:
        for piece in read_batches([file], PIECE, ["view", *columns], keep=pc.field("view") == view.name):
            rows = piece.select(columns).cast(schema).combine_chunks()
            check_index(rows)
            writer.write_batch(rows.to_batches()[0])

    return map_rows(file, f"{file.stem}-{view.name}", schema, write)


KINDS = ("regions", "pixels")


def check_index(table: pa.Table) -> None:
    """Check that an index is consistent; vectorized, since an index has one row per sample.

    Args:
        table: rows of the index with the columns that locate the image (`LOCATION_COLUMNS`).

    Raises:
        ValueError: names the invalid column and the row.
    """
    table.validate(full=True)  # offsets of strings and lists, UTF-8
    byte_ranges = [f"{kind}_{part}" for kind in KINDS for part in ("offset", "size")]
    for name in ("sample_id", "image_id", "source", "shard", "key", "pixels_extension", *byte_ranges):
        if table[name].null_count:
            raise ValueError(f"row {_first(pc.is_null(table[name]))}: `{name}` is missing")
    _refuse(table, "shard", pc.less(table["shard"], -1), "is not a shard number")
    _refuse(table, "key", pc.invert(pc.match_substring_regex(table["key"], f"^{KEY}*$")), "is not a member name")
    is_extension = pc.is_in(table["pixels_extension"], value_set=pa.array(["", "png", "jpg"]))
    _refuse(table, "pixels_extension", pc.invert(is_extension), "is not one of png, jpg")
    for kind in KINDS:
        offset, size = table[f"{kind}_offset"], table[f"{kind}_size"]
        _refuse(table, f"{kind}_size", pc.less(size, 0), "is negative")
        # a member's header comes before its contents
        before = pc.and_(pc.greater(size, 0), pc.less(offset, BLOCK))
        _refuse(table, f"{kind}_offset", before, "is before the first member")


def _refuse(table: pa.Table, column: str, bad: pa.ChunkedArray, why: str) -> None:
    if pc.any(bad).as_py():
        row = _first(bad)
        raise ValueError(f"row {row}: `{column}` {str(table[column][row])[:60]!r} {why}")


def _first(bad: pa.ChunkedArray) -> int:
    row: int = pc.index(bad, True).as_py()
    return row
