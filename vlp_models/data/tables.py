"""The canonical tables: the one form that every public format is converted to.

Ids are strings and start with their dataset's name (`scenes/17`), so tables of several datasets can be concatenated.
`provenance` names the file and the line or record of a row. Boxes are in pixels, x1 y1 x2 y2.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlp_models.data.views import TABLES, Computed
from vlp_models.errors import DataError, first_line

SPLITS = ("train", "val", "test")
_SPLIT_SYNONYMS = {
    **dict.fromkeys(("training", "restval"), "train"),  # restval: the rest of COCO's val2014, in Karpathy's file
    **dict.fromkeys(("validation", "valid", "dev", "development"), "val"),
    "testing": "test",
}
BATCH_ROWS = 32_768  # rows that a `TableWriter` holds in memory

_IMAGES = pa.schema(
    [
        ("image_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("path", pa.string()),  # relative to the project's root if inside it, else absolute
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("sha256", pa.string()),
        ("provenance", pa.string()),
    ]
)
_OBJECTS = pa.schema(
    [
        ("object_id", pa.string()),
        ("image_id", pa.string()),
        ("category", pa.string()),
        ("x1", pa.float32()),
        ("y1", pa.float32()),
        ("x2", pa.float32()),
        ("y2", pa.float32()),
        (
            "attributes",
            pa.list_(pa.string()),
        ),  # words that describe it in addition to its category; null if unknown
        ("provenance", pa.string()),
    ]
)
_QUARANTINE = pa.schema(
    [
        ("table", pa.string()),
        ("row_id", pa.string()),
        ("rule", pa.string()),
        ("reason", pa.string()),
        ("provenance", pa.string()),
    ]
)


# tables that are not a view's
_FIXED_SCHEMAS = {"images": _IMAGES, "objects": _OBJECTS, "quarantine": _QUARANTINE}
_FIXED_IDS = {"images": "image_id", "objects": "object_id"}


SCHEMAS: Mapping[str, pa.Schema] = Computed(
    lambda: ("images", *TABLES, "objects", "quarantine"),
    lambda name: _FIXED_SCHEMAS[name] if name in _FIXED_SCHEMAS else TABLES[name].schema,
)
ID_COLUMN: Mapping[str, str] = Computed(
    lambda: ("images", *TABLES, "objects"),
    lambda name: _FIXED_IDS[name] if name in _FIXED_IDS else TABLES[name].id_column,
)


LANGUAGES = "languages.jsonl"  # of captions, next to their table: image_id, caption_id, language
UNKNOWN = "unknown"  # language of a caption that names none
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")  # BCP 47: de, pt-br, zh-hant
_NO_LANGUAGE = ("und", "mis", "mul", "zxx", "nan", "na")  # ISO 639's, and what spreadsheets write in place of nothing


def standard_language(name: object) -> str:
    """Return a language code in lower case with hyphens; `unknown` for anything else."""
    # pt_BR -> pt-br
    code = name.strip().lower().replace("_", "-") if isinstance(name, str) else ""
    return code if _LANGUAGE.fullmatch(code) and code not in _NO_LANGUAGE else UNKNOWN


def read_languages(directory: Path, image_ids: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """Return language -> image id -> its captions in that language; empty if no caption of the images names one.

    Args:
        directory: of the validated tables.
    """
    if not (directory / LANGUAGES).exists():
        return {}
    # (image id, caption id) -> language
    with (directory / LANGUAGES).open(encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        # Captions of other images are not held in memory.
        languages = {
            (row["image_id"], row["caption_id"]): row["language"] for row in rows if row["image_id"] in image_ids
        }
    captions: dict[str, dict[str, list[str]]] = {}
    for table in read_batches([directory / "captions.parquet"], BATCH_ROWS) if languages else ():
        for row in table.to_pylist():
            if row["image_id"] in image_ids:
                language = languages.get((row["image_id"], row["caption_id"]), UNKNOWN)
                captions.setdefault(language, {}).setdefault(row["image_id"], []).append(row["text"])
    return dict(sorted(captions.items()))


def standard_split(name: str) -> str:
    """Return train, val or test for a usual synonym (`validation`, `valid`, `dev`, any letter case), else the name."""
    name = name.strip().lower()
    return _SPLIT_SYNONYMS.get(name, name)


def check_split(split: str | None) -> None:
    """Raise a ValueError with the reason if an image has no split or an unknown one."""
    if not split:
        raise ValueError("no split, although other images of the dataset have one")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")


class TableWriter:
    """Write `<name>.parquet` row by row, holding up to `BATCH_ROWS` rows; the same rows give the same bytes.

    Iterating finishes the file and reads the rows back.
    """

    def __init__(self, name: str, directory: Path, schema: pa.Schema | None = None) -> None:
        """schema: of a table that is not in `SCHEMAS`."""
        self.path = directory / f"{name}.parquet"
        self._schema = SCHEMAS[name] if schema is None else schema
        self._held: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._written = 0
        self._closed = False

    def append(self, row: dict[str, Any]) -> None:
        self._held.append(row)
        if len(self._held) == BATCH_ROWS:
            self._flush()

    def extend(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.append(row)

    def write(self, rows: pa.Table) -> None:
        """Write many rows at once."""
        # Rows that were appended before come first.
        self._flush()
        if len(rows):
            self._open().write_table(rows)
            self._written += len(rows)

    def close(self) -> None:
        """Write the remaining rows. A table without rows is written too."""
        if self._closed:
            return
        self._flush()
        if not self._written:
            self._open().write_table(self._schema.empty_table())
        self._open().close()
        self._closed = True

    def __len__(self) -> int:
        return self._written + len(self._held)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.close()
        for batch in read_batches([self.path], BATCH_ROWS):
            yield from batch.to_pylist()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        if self._held:
            self._open().write_table(pa.Table.from_pylist(self._held, schema=self._schema))
            self._written += len(self._held)
            self._held = []

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, self._schema, compression="zstd")
        return self._writer


ROW_GROUPS = 1024  # up to twice as many in a file; a reader holds statistics of every column of each


class RowGroups:
    """Write a Parquet file from tables, one row group each; several each if there are too many. A context manager."""

    def __init__(self, path: Path, schema: pa.Schema, tables: int) -> None:
        """tables: number of tables that will be written."""
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._per_group = max(1, tables // ROW_GROUPS)
        self._held: list[pa.Table] = []

    def write(self, rows: pa.Table) -> None:
        self._held.append(rows)
        if len(self._held) == self._per_group:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        # one call writes one row group
        self._writer.write_table(pa.concat_tables(self._held).combine_chunks())
        self._held = []


def write_table(rows: Iterable[dict[str, Any]], name: str, directory: Path) -> Path:
    """Write rows as `<name>.parquet`; the same rows give the same bytes."""
    with TableWriter(name, directory) as writer:
        writer.extend(rows)
    return writer.path


def read_table(name: str, directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read `<name>.parquet`, or some of its columns; a missing table is empty."""
    path = directory / f"{name}.parquet"
    if not path.exists():
        empty = SCHEMAS[name].empty_table()
        return empty if columns is None else empty.select(list(columns))
    with damage_errors(path):
        return pq.read_table(path, schema=SCHEMAS[name], columns=columns)


def stream_table(name: str, directory: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of `<name>.parquet`, or some of its columns, piece by piece; a missing table has none."""
    path = directory / f"{name}.parquet"
    if path.exists():
        yield from read_batches([path], BATCH_ROWS, SCHEMAS[name].names if columns is None else columns)


def read_rows(
    name: str, directory: Path, keep: Callable[[pa.Table], Any], columns: Sequence[str] | None = None
) -> pa.Table:
    """Read the rows of `<name>.parquet` that `keep` selects from a piece of it by a mask; memory holds only these."""
    schema = SCHEMAS[name] if columns is None else pa.schema([SCHEMAS[name].field(column) for column in columns])
    pieces = [rows.filter(keep(rows)) for rows in stream_table(name, directory, columns)]
    return pa.concat_tables([schema.empty_table(), *pieces])


def read_rows_of(image_ids: pa.Array, name: str, directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of `<name>.parquet` with one of these images."""
    return read_rows(name, directory, lambda rows: pc.is_in(rows["image_id"], value_set=image_ids), columns)


def count_values(name: str, directory: Path, *columns: str) -> Counter[Any]:
    """Count the values of a column of `<name>.parquet`, or the tuples of several, in the order of first occurrence."""
    counts: Counter[Any] = Counter()
    for rows in stream_table(name, directory, columns):
        values = [rows[column].to_pylist() for column in columns]
        counts.update(values[0] if len(columns) == 1 else zip(*values, strict=True))
    return counts


@contextmanager
def damage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        reason = first_line(error).rpartition(f"{path}': ")[2]  # Arrow names the file in some messages
        raise DataError(f"{path}: damaged ({reason}); remove it and run the stage that writes it again") from None


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a file to read it batch by batch; by default Arrow keeps everything it has read until the end."""
    return pq.ParquetFile(path, pre_buffer=False)


def read_batches(
    paths: Iterable[Path], size: int, columns: Sequence[str] | None = None, keep: pc.Expression | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of files of one schema that `keep` selects, `size` at a time; the last batch may be smaller."""
    # a batch of Arrow ends with its row group: join them, so that all batches but the last have the same size
    pending: list[pa.Table] = []
    count = 0
    for path in paths:
        with damage_errors(path), open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=size, columns=None if columns is None else list(columns)):
                rows = pa.Table.from_batches([batch])
                pending.append(rows if keep is None else rows.filter(keep))
                count += len(pending[-1])
                while count >= size:
                    table = pa.concat_tables(pending)
                    yield table.slice(0, size)
                    pending, count = [table.slice(size)], count - size
    if count:
        yield pa.concat_tables(pending)
