"""Joins, groups and sorts of tables larger than memory: DuckDB with a memory limit, spilling to disk.

Tables go in and come out as Arrow, piece by piece. `write_boxed` joins images and their boxes into boxed.parquet, which
is all that detector training reads: images without boxes, captions and provenance do not change this table, and so do
not make the detector stale.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.common.io import scratch_directory
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, TableWriter, stream_table
from vlp_models.errors import DataError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "384MB"  # limit of DuckDB; the rest is spilled to files


class Database:
    """A temporary database: `with Database.within(directory) as database:`."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self._connection = connection
        self._numbers = count()

    @staticmethod
    @contextmanager
    def within(directory: Path | None = None) -> Iterator[Database]:
        """Open a database whose files are in a temporary folder of `directory` (default: the system's)."""
        import duckdb

        scratch = tempfile.TemporaryDirectory() if directory is None else scratch_directory(directory / "joins")
        with scratch as folder:
            settings: dict[str, str | bool | int | float | list[str]] = {
                "memory_limit": MEMORY,
                "temp_directory": str(Path(folder) / "spilled"),
                "threads": 2,
                "preserve_insertion_order": True,  # a table without ORDER BY is read in insertion order
                "autoinstall_known_extensions": False,  # nothing is downloaded
                "autoload_known_extensions": False,
            }
            with duckdb.connect(Path(folder) / "joins.duckdb", config=settings) as connection:
                yield Database(connection)

    def load(self, name: str, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
        """Create the table `name` from rows that come piece by piece. An error of `tables` is raised as it is."""
        failed: list[Exception] = []  # DuckDB reports it as an error of its own

        def pieces() -> Iterator[pa.RecordBatch]:
            try:
                for table in tables:
                    yield from table.select(schema.names).cast(schema).to_batches()
            except Exception as error:
                failed.append(error)
                raise

        # DuckDB pulls the pieces one by one while it runs the command
        self._connection.register("_pieces", pa.RecordBatchReader.from_batches(schema, pieces()))
        try:
            self.run(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM _pieces")
        except Exception:
            # the caller's own error, not DuckDB's report of it
            if failed:
                raise failed[0] from None
            raise
        finally:
            self._connection.unregister("_pieces")

    def run(self, command: str) -> None:
        self._connection.execute(command).fetchall()

    def stream(self, query: str, size: int = BATCH_ROWS) -> Iterator[pa.Table]:
        """Yield the rows of a query, about `size` at a time. Meanwhile the connection may be used for other queries.

        The result is stored as a table first: a sort that is streamed needs memory that grows with the rows, and
        several at once more than there is.
        """
        # a name of its own, since several results may be streamed at once
        name = f"answer_{next(self._numbers)}"
        self.run(f"CREATE TABLE {name} AS {query}")
        with self._connection.cursor() as cursor:
            with cursor.sql(f"SELECT * FROM {name}").to_arrow_reader(size) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])
            cursor.execute(f"DROP TABLE {name}")

    def value(self, query: str) -> object:
        """Return the single value of a query."""
        ((value,),) = self._connection.execute(query).fetchall()
        return value


class RowCursor:
    """Reads rows that are sorted by their column `row`, up to a given number at a time."""

    def __init__(self, pieces: Iterator[pa.Table]) -> None:
        self._pieces = pieces
        self._remaining: pa.Table | None = None  # rows of the current piece that are not returned yet

    def before(self, number: int) -> list[dict[str, Any]]:
        """Return the remaining rows whose `row` is below `number`."""
        taken: list[dict[str, Any]] = []
        while True:
            if self._remaining is None:
                self._remaining = next(self._pieces, None)
            if self._remaining is None:
                return taken
            rows = self._remaining["row"].to_numpy()
            # rows are sorted by `row`: the first `count` are below `number`
            count = int(np.searchsorted(rows, number))
            taken += self._remaining.slice(0, count).to_pylist()
            if count < len(rows):
                self._remaining = self._remaining.slice(count)
                return taken
            self._remaining = None


FILE = "boxed.parquet"
OBJECT = ("category", "x1", "y1", "x2", "y2", "attributes")  # columns of a row of `objects`
IMAGE = ("image_id", "source", "split", "path", "width", "height", "sha256")  # columns of a row of `images`


def write_boxed(directory: Path) -> Path:
    """Write boxed.parquet next to the validated tables in `directory`, and return its path.

    One row per image with a box, in the order of ids; objects in the order of their table.
    """
    kinds = pa.struct([SCHEMAS["objects"].field(name) for name in OBJECT])
    schema = pa.schema([*(SCHEMAS["images"].field(name) for name in IMAGE), ("objects", pa.list_(kinds))])
    with TableWriter(FILE.removesuffix(".parquet"), directory, schema) as writer:
        objects = directory / "objects.parquet"
        if objects.exists() and pq.read_metadata(objects).num_rows:
            # objects come sorted by image
            for _, group in groupby(_objects(directory), key=itemgetter("image_id")):
                rows = list(group)  # the objects of one image
                image = {name: rows[0][name] for name in IMAGE}
                image["objects"] = [{name: row[f"of_{name}"] for name in OBJECT} for row in rows]
                writer.append(image)
    return writer.path


def _objects(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects with their image's columns; their own columns start with `of_`."""
    with Database.within(directory) as database:
        # `row` keeps the order of objects, which a join does not
        for table, columns in (("images", IMAGE), ("objects", ("image_id", *OBJECT))):
            schema = pa.schema([*(SCHEMAS[table].field(name) for name in columns), pa.field("row", pa.int64())])
            database.load(table, number_rows(stream_table(table, directory, columns)), schema)
        # the columns of both tables have names in common, such as image_id
        selected = [f"i.{name}" for name in IMAGE]
        selected += [f"o.{name} AS of_{name}" for name in OBJECT]
        joined = "FROM objects o JOIN images i ON o.image_id = i.image_id ORDER BY i.image_id, o.row"
        for piece in database.stream(f"SELECT {', '.join(selected)} {joined}"):
            yield from piece.to_pylist()


def number_rows(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the pieces of a table with the column `row`, from 0."""
    start = 0
    for rows in pieces:
        yield rows.append_column("row", pa.array(range(start, start + len(rows)), pa.int64()))
        start += len(rows)


def read_boxed(directory: Path) -> list[dict[str, Any]]:
    """Return the rows: an image's columns, and `objects`, a list.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = directory / FILE
    try:
        return list(pq.read_table(path).to_pylist())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; run `dvc repro validate`") from None
    except pa.ArrowException as error:
        raise DataError(f"{path}: damaged ({error}); run `dvc repro validate`") from None


def hash_boxes(directory: Path) -> str:
    """Return a hash of everything a vision warm-up trains on: the rows of the train split; see `read_boxed`."""
    rows = [row for row in read_boxed(directory) if row["split"] == "train"]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
