"""Shared code of the readers of public formats: tables, record fields, and the quarantine of bad records.

A reader is a function `read(name, params, base) -> Tables`: `name` is the dataset's name, `base` the directory that
`params.root` is relative to. It opens no image; those inside other files it copies to files (`Tables.extract`). It
raises `DataError` for a file that is missing or not in the format; a single record it cannot read becomes a quarantine
row, and reading continues.

A reader appends rows and never reads them back, so they need not stay in memory: within `spooled` they go to files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import convert_command, is_line
from vlp_models.data.images import MAX_BYTES
from vlp_models.data.tables import BATCH_ROWS, LANGUAGES, SCHEMAS, TableWriter, read_batches
from vlp_models.data.views import OTHER_IMAGES

Row = dict[str, Any]
# A byte that is not UTF-8 is the surrogate U+DC80 to U+DCFF: `\udc80` in a repr, `\\udc80` if it was escaped twice.
_BYTE = re.compile(r"\\?\\udc[89a-f]")  # as `repr` shows what `surrogateescape` carries over
# `captions.json#annotations[17]`, `dev.json:12` or `image_data.json[3]` -> the file's name.
_FILE = re.compile(r"[#:]|(?<=\.json)\[")  # ends the name of the file in a provenance
# Soft hyphen, zero-width space, marks of direction, byte-order mark and the like, and the choice of a symbol's look.
# Not zero-width joiners (U+200C, U+200D), with which several scripts spell.
_UNSEEN = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufe0e\ufe0f\ufeff]")
_ROUNDED = re.compile(r"\d[.,]\d+E\+\d+")  # 1.23E+12
TRUTH = "truth.jsonl"
LINES = {"truth": TRUTH, "languages": LANGUAGES}  # rows about images that are JSON lines
LARGE = 2**31  # numbers of pixels are below this
SIGNATURES = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"RIFF", ".webp"),
)
EXTRACTED = "images"  # folder of data/interim/NAME: images that a dataset has inside other files


class Rows(Protocol):
    """Rows of one table: a list, or a file that is being written."""

    def append(self, row: Row, /) -> None: ...
    def extend(self, rows: Iterable[Row], /) -> None: ...
    def __iter__(self) -> Iterator[Row]: ...
    def __len__(self) -> int: ...


Reader = TypeVar("Reader", bound=Callable[..., Any])


def fills(
    *views: str,
    origin_of_val: str = "",
    way_to_get: str = "",
    check_root: Callable[[str, str], object] | None = None,
    pin_root: Callable[[str, str], str] | None = None,
) -> Callable[[Reader], Reader]:
    """Name the views whose tables a reader fills: stages then depend on the code of these views and of no others.

    Args:
        origin_of_val: for a reader that divides no split: where its val comes from. `{name}` is the dataset's.
        way_to_get: what to do if the dataset's folder is missing. `{name}` is the dataset's, `{root}` the folder.
        check_root: for a reader that also downloads datasets: raises a ParamsError if an address is invalid or may
            move; it gets the dataset's name and `root`.
        pin_root: likewise; returns the address with the version that it has now. `vlp use` writes it to params.yaml.
    """

    def named(reader: Reader) -> Reader:
        reader.views = views  # type: ignore[attr-defined]
        reader.origin_of_val = origin_of_val  # type: ignore[attr-defined]
        reader.way_to_get = way_to_get  # type: ignore[attr-defined]
        reader.check_root, reader.pin_root = check_root, pin_root  # type: ignore[attr-defined]
        return reader

    return named


_spool: ContextVar[Path | None] = ContextVar("spool", default=None)


@contextmanager
def spooled(directory: Path) -> Iterator[None]:
    """Make the next `Tables` write its rows to files in `directory` instead of holding them in memory."""
    # a context variable: readers keep the signature of plugins
    token = _spool.set(directory)
    try:
        yield
    finally:
        _spool.reset(token)


_extracted: ContextVar[tuple[Path | None, bool]] = ContextVar("extracted", default=(None, False))


@contextmanager
def extracted_in(directory: Path, *, write: bool = False) -> Iterator[None]:
    """Let readers name the images that `prepare` has extracted to its output `directory`.

    Args:
        write: whether readers write the images there; by default they are there.
    """
    token = _extracted.set((directory, write))
    try:
        yield
    finally:
        _extracted.reset(token)


class _Lines:
    """`Rows` without a schema: one JSON object per line; no file if there are no rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._count = 0

    def append(self, row: Row) -> None:
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8", newline="\n")
        self._file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
        self._count += 1

    def extend(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.append(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def filtered(self, keep: Callable[[Row], bool]) -> _Lines:
        """Write the file again with some of its rows, and return them."""
        rows = _Lines(self._path.with_name(f".{self._path.name}.filtered"))
        rows.extend(row for row in self if keep(row))
        rows.close()
        self._path.unlink()
        if len(rows):
            rows._path.rename(self._path)
        rows._path = self._path
        return rows

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        # Reading needs the end of the file: write what is buffered first.
        self.close()
        if self._count:
            with self._path.open(encoding="utf-8", newline="\n") as file:
                yield from map(json.loads, file)


@dataclass
class Tables:
    """Rows of the canonical tables, with the names and keys of `tables.SCHEMAS`: `tables["captions"]`.

    `images` rows have the file's path under `path` (joined with `base`, as text) and None for width, height and sha256,
    which the prepare stage reads from the file. `truth` rows have `image_id` and any other keys of the source.
    """

    directory: Path | None = field(default_factory=_spool.get)  # None: rows are lists
    skipped: Counter[str] = field(
        default_factory=Counter
    )  # valid records that are not used, by kind, e.g. crowd regions
    notes: Counter[str] = field(default_factory=Counter)  # records that are used although something is odd, by kind
    ignored: set[str] = field(default_factory=set)  # names of columns or keys of a listing that are not read
    # Id of each image that the reader assigned a split to -> what decides it; empty unless `group_near_duplicates` lets
    # `prepare` divide again. `divided`: into train, val and test (`splits.Division`); `held_out`: training images, of
    # which `val_fraction` is cut (`splits.hold_out`).
    divided: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Rows] = field(init=False)

    def __post_init__(self) -> None:
        if self.directory is None:
            self.rows = {name: [] for name in (*SCHEMAS, *LINES)}
            return
        # a directory is for one `Tables`: the next ones are in memory
        _spool.set(None)
        self.rows = {name: TableWriter(name, self.directory) for name in SCHEMAS}
        self.rows |= {name: _Lines(self.directory / file) for name, file in LINES.items()}

    def __getitem__(self, table: str) -> Rows:
        return self.rows[table]

    def extract(self, content: bytes) -> Path:
        """Write an image that is inside another file to a file of its own, named by its content; return the file.

        Raises:
            RecordError: it is empty, or larger than an image may be.
        """
        if not content:
            raise RecordError("the image is empty", rule="image_not_empty")
        if len(content) > MAX_BYTES:
            raise RecordError(f"the image has more than {MAX_BYTES >> 20} MiB", rule="image_not_a_bomb")
        # `prepare` writes its output; later reads name what is there
        directory, write = (self.directory, True) if self.directory is not None else _extracted.get()
        if directory is None:
            raise ValueError("images are extracted to the output of `prepare`; read within `spooled` or `extracted_in`")
        # equal images share one file; 256 folders, since one of a million files is slow
        digest = hashlib.sha256(content).hexdigest()
        # by content: `prepare` checks the format again
        # The first bytes decide, not the name that the dataset gives.
        suffix = next((suffix for start, suffix in SIGNATURES if content.startswith(start)), ".img")
        file = directory / EXTRACTED / digest[:2] / f"{digest}{suffix}"
        if write and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)  # the whole folder is complete or absent: `output_directory`
        return file

    def close(self) -> None:
        """Close the files, if rows go to files."""
        for rows in self.rows.values():
            if isinstance(rows, TableWriter | _Lines):
                rows.close()

    def describe_ignored(self) -> str:
        """Return `ignored columns: license, photographer`; empty if every column is read."""
        names = sorted(self.ignored)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"ignored columns: {', '.join(names[:8])}{more}" if names else ""

    def keep_lines(self, of: Callable[[str], bool]) -> None:
        """Remove ground truth and languages of all images for which `of` is false."""
        for name in LINES:
            rows = self[name]
            if not isinstance(rows, _Lines):
                self.rows[name] = [row for row in rows if of(row["image_id"])]
            elif len(rows):
                self.rows[name] = rows.filtered(lambda row: of(row["image_id"]))

    def quarantine(self, table: str, row_id: str, rule: str, reason: str, provenance: str) -> None:
        """Add one bad row to the quarantine. `row_id` may be empty if the record has no readable id.

        The rule `text_utf8` adds the command that converts the file, unless it is a tar, which that would damage.
        """
        file = _FILE.split(provenance)[0]
        # the way out depends on the file: a tar cannot be converted as text
        if rule == "text_utf8" and _BYTE.search(reason):
            is_tar = file.endswith(".tar")
            reason += "; build the tar again with UTF-8" if is_tar else f"; convert the file: {convert_command(file)}"
        self["quarantine"].append(
            {
                "table": table,
                "row_id": row_id.encode("utf-8", "backslashreplace").decode("utf-8"),  # else unchanged, for look-ups
                "rule": rule,
                "reason": printable(reason),
                "provenance": provenance,
            }
        )

    def add_caption(self, caption_id: str, image_id: str, text: str, provenance: str) -> None:
        row = {"caption_id": caption_id, "image_id": image_id, "text": text, "provenance": provenance}
        self["captions"].append(row)

    @contextmanager
    def record(self, table: str, provenance: str, row_id: str = "") -> Iterator[None]:
        """Turn a `RecordError` raised while one record is read into a quarantine row."""
        try:
            yield
        except RecordError as error:
            self.quarantine(table, row_id, error.rule, str(error), provenance)


class RecordError(ValueError):
    """One record cannot be read. `rule` is the name it is counted under."""

    def __init__(self, reason: str, rule: str = "record_readable") -> None:
        super().__init__(reason)
        self.rule = rule


def join_id(source: str, local: str | int) -> str:
    """Return `<source>/<id>`, which is unique over all datasets."""
    return f"{source}/{local}"


def image_row(
    image_id: str,
    *,
    source: str,
    split: str,
    path: str,
    provenance: str,
    width: int | None = None,
    height: int | None = None,
) -> Row:
    """Return a row of `images`; the prepare stage fills in what the file shows.

    Raises:
        RecordError: width or height do not fit into the column.
    """
    if not all(side is None or abs(side) < LARGE for side in (width, height)):
        raise RecordError(f"invalid image size: {_short(width)} x {_short(height)} pixels")
    return {
        "image_id": image_id,
        "source": source,
        "split": split,
        "path": path,
        "width": width,
        "height": height,
        "sha256": None,
        "provenance": provenance,
    }


def printable(text: str) -> str:
    """Return `text` with bytes that are not UTF-8 escaped, and characters that control a terminal or hide text.

    Line ends are among them: the result is one line.
    """
    if text.isprintable():
        return text
    return "".join(char if is_line(char) else char.encode("unicode_escape").decode("ascii") for char in text)


def get(record: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of the given type.

    Raises:
        RecordError: the field is missing or has another type.
    """
    if not isinstance(record, dict):
        raise RecordError(f"expected an object, found {_short(record)}")
    if key not in record:
        raise RecordError(f"no field `{key}`; has {', '.join(map(str, record)) or 'none'}")
    value = record[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # A JSON true is an int in Python: accept it only where a boolean is expected.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RecordError(f"`{key}` is {_short(value)}, expected {' or '.join(k.__name__ for k in kinds)}")
    return value


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a usable coordinate: a float, or a whole number below `LARGE`."""
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGE)


def get_size(record: Row) -> tuple[int | None, int | None]:
    """Return the optional fields `width` and `height`; both are None if either is not a positive whole number.

    The file itself has the size, so a placeholder (null, 0, "") costs nothing. 96.0 and "96" are 96.
    """
    sides = []
    for key in ("width", "height"):
        value: Any = record.get(key)
        try:
            # NaN, like 0 and 1.5, is no size
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            return None, None
        except OverflowError:  # a whole number with hundreds of digits, which `image_row` refuses
            number = float(LARGE)
        if not (number > 0 and number.is_integer()):
            return None, None
        sides.append(int(number))
    return sides[0], sides[1]


def get_id(record: Any, key: str) -> str:
    """Return an id as text. Public files have whole numbers or strings; tables saved from pandas have 9.0 for 9."""
    value = get(record, key, (int, float, str))
    # pandas writes a column of numbers with gaps as floats, which are exact up to 2**53
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        value = int(value)
    local = "" if isinstance(value, float) else str(value)
    if not local or not is_utf8(local):
        raise RecordError(f"`{key}` is not an id: {_short(value)}")
    if _ROUNDED.fullmatch(local):
        raise RecordError(f"`{key}` is {local}, a number that a spreadsheet has rounded; save the column as text")
    return local


def get_text(record: Any, key: str) -> str:
    """Return a text field unchanged.

    Raises:
        RecordError: under the rule `text_utf8` if its bytes are not UTF-8.
    """
    value: str = get(record, key, str)
    if not is_utf8(value):
        raise RecordError(f"`{key}` is not UTF-8: {_short(value)}", rule="text_utf8")
    return value


def get_sentence(record: Any, key: str) -> str:
    """Return `get_text` with all white space, including line breaks, collapsed: COCO captions end in newlines.

    Characters that are not shown are removed: a tokenizer drops them, so no caption could equal a reference with them.
    """
    return " ".join(_UNSEEN.sub("", get_text(record, key)).split())


def is_utf8(text: str) -> bool:
    """Return False if `surrogateescape` had to carry over a byte, or if JSON escaped half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def remove_images(tables: Tables, images: Set[str]) -> int:
    """Remove all rows about these images, also pairs with one of them, from all tables except `images`.

    Returns:
        How many rows were removed.
    """
    count = 0
    for name, schema in SCHEMAS.items():
        if name == "images" or "image_id" not in schema.names:
            continue
        rows = tables[name]
        if isinstance(rows, TableWriter):
            rows.close()
            # rename the file, and write it again without the rows
            before = rows.path.rename(rows.path.with_name(".whole.parquet"))
            with TableWriter(name, rows.path.parent) as writer:
                for batch in read_batches([before], BATCH_ROWS):
                    writer.write(batch.filter(pc.invert(_mask_rows(batch, images))))
            before.unlink()
            remaining: Rows = writer
        else:
            remaining = []
            for row in rows:
                if images.isdisjoint([row["image_id"], *(row.get(OTHER_IMAGES.name) or ())]):
                    remaining.append(row)
        tables.rows[name] = remaining
        count += len(rows) - len(remaining)
    tables.keep_lines(lambda image: image not in images)
    return count


def _mask_rows(batch: pa.Table, images: Set[str]) -> pa.Array:
    """Return which rows are about one of the images."""
    matches = pc.is_in(batch["image_id"], value_set=pa.array(sorted(images), pa.string()))
    if OTHER_IMAGES.name not in batch.column_names:
        return matches
    # a row with several images is removed with any of them
    other_matches = [not images.isdisjoint(names or ()) for names in batch[OTHER_IMAGES.name].to_pylist()]
    return pc.or_(matches, pa.chunked_array([other_matches], pa.bool_()))
