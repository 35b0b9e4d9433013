"""Memory-mapped files: copies of large Parquet files, to read rows by number or by the value of a column, and values.

A copy is uncompressed Arrow in a hidden folder next to the file's folder. It is written once; processes share its
pages, and the system drops them when it needs the memory. Memory holds what is read, and one value per `PIECE` rows.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlp_models.common.io import atomic_write, stat_file
from vlp_models.data.joins import Database
from vlp_models.data.tables import SCHEMAS, damage_errors, read_batches

PIECE = 65_536  # rows
MAPPED = 200_000  # a file with at least this many rows is mapped


def copy_path(file: Path, name: str) -> Path:
    """Return where the copy of a file is, or will be.

    Raises:
        OSError: no such file.
    """
    # a changed file has another stamp, and so another copy
    stamp = "-".join(f"{number:x}" for number in stat_file(file.stat()))
    return file.parent.with_name(f".{file.parent.name}-mapped") / f"{name}-{stamp}.arrow"


def is_mapped(file: Path, name: str) -> bool:
    """Return whether a Parquet file is large, or has a copy; a copy saves reading the file's metadata.

    Raises:
        OSError, pyarrow.ArrowException: no such file, or a damaged one.
    """
    return copy_path(file, name).exists() or pq.read_metadata(file).num_rows >= MAPPED


def map_rows(
    file: Path, name: str, schema: pa.Schema, write: Callable[[pa.ipc.RecordBatchWriter, Path], None]
) -> pa.Table:
    """Map the copy of `file`, which is valid as long as the file does not change.

    Args:
        name: of the copy; copies with this name of an older file are removed.
        write: writes the rows of a new copy; may use the given folder.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    path = copy_path(file, name)
    folder = path.parent
    # several processes may write the copy at once: each writes its own file and renames it
    if not path.exists():
        folder.mkdir(exist_ok=True)
        with (
            atomic_write(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            write(writer, folder)
        # copies of older versions of the file
        for other in folder.glob(f"{name}-*.arrow"):
            if other != path:
                with contextlib.suppress(FileNotFoundError):
                    other.unlink()
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class SortedRows:
    """Rows by the value of the column `key`, found by bisection; of several rows with one value, any."""

    def __init__(self, table: pa.Table, key: str) -> None:
        """table: sorted by `key`."""
        self._pieces = [piece for piece in table.to_batches(max_chunksize=PIECE) if len(piece)]
        self._key = key
        self._names = table.schema.names
        # The first value of each piece, in memory: bisection finds the piece without touching the file.
        self._first: list[Any] = [piece[key][0].as_py() for piece in self._pieces]

    @classmethod
    def open(cls, file: Path, key: str, schema: pa.Schema) -> SortedRows:
        """Read or map a Parquet file, whose rows may have any order.

        Raises:
            OSError, pyarrow.ArrowException: no such file, or a damaged one, or one with null or negative values.
        """
        if is_mapped(file, file.stem):
            write_copy = partial(_write_sorted, file=file, key=key, schema=schema)
            with contextlib.suppress(OSError):  # folder not writable or full: keep the rows in memory
                return cls(map_rows(file, file.stem, schema, write_copy), key)
        rows = pq.read_table(file, schema=schema)
        _check(rows)
        # Arrow sorts by UTF-8 bytes, which is also Python's order of strings
        wide = rows.set_column(rows.schema.names.index(key), key, rows[key].cast(pa.large_string()))
        return cls(wide.sort_by(key).combine_chunks(), key)

    def find(self, value: str) -> dict[str, Any] | None:
        """Return the row with this value; None if it is not found."""
        # the piece that may have the value, then the row in it
        number = bisect_right(self._first, value) - 1
        if number < 0:
            return None
        piece = self._pieces[number]
        values = piece[self._key]
        # Bisection over row numbers: only the values that it compares are read.
        row = bisect_left(range(len(values)), value, key=lambda i: values[i].as_py())
        if row == len(values) or values[row].as_py() != value:
            return None
        return {name: piece[name][row].as_py() for name in self._names}


class ImagePaths:
    """The paths of the images in a directory of canonical tables.

    Raises:
        DataError: the table is damaged.
    """

    def __init__(self, directory: Path) -> None:
        file, self._rows = directory / "images.parquet", None
        schema = pa.schema([SCHEMAS["images"].field(name) for name in ("image_id", "path")])
        if file.exists():
            with damage_errors(file):
                self._rows = SortedRows.open(file, "image_id", schema)

    def find(self, image_id: str) -> str | None:
        """Return the path of an image as the table has it; None if it has no such image."""
        row = self._rows.find(image_id) if self._rows is not None else None
        return None if row is None else str(row["path"])


class MappedValues:
    """Values in a new file, such as texts; iterating, also more than once, holds some of them at a time."""

    def __init__(self, path: Path, pieces: Iterable[list[Any]], kind: pa.DataType) -> None:
        """pieces: the values, some at a time."""
        self._path, self._length = path, 0
        schema = pa.schema([("value", kind)])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for piece in pieces:
                writer.write_batch(pa.record_batch([pa.array(piece, kind)], schema))
                self._length += len(piece)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        with pa.memory_map(str(self._path)) as source:
            pieces = pa.ipc.open_file(source)
            for number in range(pieces.num_record_batches):
                yield from pieces.get_batch(number)["value"].to_pylist()

    def __contains__(self, value: object) -> bool:
        return any(value == other for other in self)


def _check(rows: pa.Table) -> None:
    """Check that no value is null or a negative number; an ArrowInvalid names the column."""
    rows.validate(full=True)
    for field in rows.schema:
        is_number = pa.types.is_integer(field.type)
        if rows[field.name].null_count or (is_number and pc.any(pc.less(rows[field.name], 0)).as_py()):
            raise pa.ArrowInvalid(f"column `{field.name}` has null or negative values")


def _write_sorted(writer: pa.ipc.RecordBatchWriter, folder: Path, file: Path, key: str, schema: pa.Schema) -> None:
    """Write the rows of a file in the order of `key`; they are sorted on disk unless they have that order already."""
    # check all rows, and whether they are in order
    last, in_order = "", True
    for rows in read_batches([file], PIECE, schema.names):
        _check(rows)
        values = rows[key].combine_chunks()
        # within this batch, and with the last value of the one before
        in_order = in_order and last <= values[0].as_py() and not pc.any(pc.greater(values[:-1], values[1:])).as_py()
        last = values[-1].as_py()
    with contextlib.ExitStack() as stack:
        pieces = read_batches([file], PIECE, schema.names)
        # too large to sort in memory
        if not in_order:
            database = stack.enter_context(Database.within(folder))
            database.load("rows", pieces, schema)
            pieces = database.stream(f'SELECT * FROM rows ORDER BY "{key}"', PIECE)
        for rows in pieces:
            writer.write_table(rows.cast(schema).combine_chunks(), PIECE)
