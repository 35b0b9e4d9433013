"""Read the files of public formats: text lines, JSON, JSON lines, and CSV with a header.

All of them keep the provenance of each record and name the file in every error. Malformed lines go to quarantine, one
by one; a file that is missing or in another format raises `DataError`.
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from vlp_models.common.io import HEAD, explain_not_text
from vlp_models.data.formats.base import RecordError, Tables, _short, printable
from vlp_models.errors import DataError, explain_system_error


def is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_text(path: Path, purpose: str) -> str:
    """Return the file's text without a byte-order mark; bytes that are not UTF-8 become surrogates (see `is_utf8`)."""
    with _readable(path, purpose):
        content = path.read_bytes()
    _check_text(content[:HEAD], path, purpose)
    return content.decode("utf-8-sig", "surrogateescape")


def open_lines(path: Path, purpose: str, *, universal: bool = False) -> Iterator[str]:
    """Yield the lines of `read_text(path).split("\\n")` one at a time, for large files.

    universal: `\\r` and `\\r\\n` end lines as well.
    """
    with _readable(path, purpose):
        binary = path.open("rb")
        # an archive or an image in place of the text is named as such
        # `peek` does not move the position, so the text starts at the first byte below.
        head = binary.peek(HEAD)[:HEAD]
    newline = None if universal else "\n"
    with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
        _check_text(head, path, purpose)
        ended = True
        while True:
            with _readable(path, purpose):
                line = file.readline()
            if not line:
                break
            ended = line.endswith("\n")
            yield line.removesuffix("\n")
        if ended:  # as `split` does: a last line that ends with "\n" is followed by an empty one
            yield ""


def _check_text(head: bytes, path: Path, purpose: str) -> None:
    if reason := explain_not_text(head, str(path)):
        raise DataError(f"{path}: {reason} ({purpose})")


@contextmanager
def _readable(path: Path, purpose: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file ({purpose}); {_explain_missing(path)}") from None
    except OSError as error:
        raise DataError(f"{explain_system_error(error)} ({purpose})") from None


def _explain_missing(path: Path) -> str:
    """Return the way out for a missing file: archives next to it that are still packed, or a folder with its path."""
    folder = next(parent for parent in path.parents if parent.is_dir())
    names = sorted(entry.name for entry in folder.iterdir()) if os.access(folder, os.R_OK) else []
    # `os.path` passes over folders that may not be entered
    if deeper := [name for name in names if os.path.isfile(folder / name / path.relative_to(folder))]:  # noqa: PTH113
        return f"it is in {folder / deeper[0]}: name that folder in params.yaml"
    if packed := [name for name in names if name.endswith(PACKED)]:
        return f"unpack {', '.join(packed[:3])} in {folder}, if it has the file"
    return "check the paths of this dataset in params.yaml"


PACKED = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")


def read_json(path: Path, purpose: str) -> Any:
    """Read a JSON file.

    Raises:
        DataError: names the file and the position where it stops being JSON.
    """
    text = read_text(path, purpose)
    if not text.strip():
        raise DataError(f"{path}: an empty file instead of {purpose}; download or write it again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, column {error.colno}); "
            f"this should be {purpose}; download or write it again"
        ) from None
    except RecursionError:
        raise DataError(f"{path}: nested too deeply for {purpose}") from None
    except ValueError as error:  # an integer with thousands of digits
        raise DataError(f"{path}: not {purpose}: {error}") from None


def read_records(path: Path, key: str, purpose: str, *, only_with: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (provenance, record) of the list under `key` of a JSON file: `captions.json#annotations[17]`.

    Args:
        only_with: a key; a file without it has no records. Default: the list must exist.

    Raises:
        DataError: the file is missing, not JSON, or has no such list.
    """
    document = read_json(path, purpose)
    if only_with and isinstance(document, dict) and only_with not in document:
        return
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        actual = f"the keys {', '.join(map(str, document))}" if isinstance(document, dict) else type(document).__name__
        if isinstance(document, list):
            actual = f"list without a key; {list_command(path.name)}"
        raise DataError(f"{path}: not {purpose}: expected a list under `{key}`, found {actual}")
    for index, record in enumerate(document[key]):
        yield f"{path.name}#{key}[{index}]", record


def list_command(name: str) -> str:
    """Return the way out for a JSON list of image-caption records, also for one of conversations (LLaVA's)."""
    target = "pairs.jsonl" if name != "pairs.jsonl" else "lines.jsonl"  # not the file itself, which `>` empties
    return (
        f"if it lists images with their captions, write JSON lines for the format pairs: `jq -c '.[]' "
        f"{shlex.quote(name)} > {target}`, or of conversations `jq -c '.[] | {{image, caption: "
        f".conversations[-1].value}}' {shlex.quote(name)} > {target}`"
    )


def read_lines(
    path: Path, tables: Tables, table: str, purpose: str, valid_keys: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (provenance, object) of each line of a JSON-lines file: `dev.json:12`. Malformed lines go to quarantine.

    Args:
        valid_keys: all keys that the format reads. Others are added to `tables.ignored`; default: any key is fine.

    Raises:
        DataError: the file is missing, none of its lines is a JSON object, or a key is a misspelled valid one.
    """
    good, bad, first = 0, 0, ""
    shapes: dict[frozenset[str], list[str]] = {}  # sets of keys that were checked
    # split on "\n" alone: str.splitlines also splits at U+2028, which JSON strings may contain
    for number, line in enumerate(open_lines(path, purpose), start=1):
        if not line.strip():
            continue
        provenance = f"{path.name}:{number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise RecordError(f"expected an object, found {_short(record)}")
        except (ValueError, RecursionError) as error:
            bad += 1
            first = first or f"line {number}: {error}"
            tables.quarantine(table, "", "record_readable", f"not a JSON object: {error}", provenance)
            continue
        good += 1
        # names are checked once per set of keys, not per line
        if valid_keys and (keys := frozenset(record)) not in shapes:
            shapes[keys] = check_names(f"{path}:{number}", "key", record, valid_keys)
            if len(shapes) > MAX_SHAPES:  # objects that have nothing in common: check each, remember none
                shapes.clear()
            tables.ignored.update(shapes.get(keys, ()))
        yield provenance, record
    # another kind of file, not one with a few bad lines
    if bad and not good:
        if next(open_lines(path, purpose)).startswith("["):
            first = f"it is a JSON list: {list_command(path.name)}"
        raise DataError(f"{path}: not {purpose}: none of its {bad} lines is a JSON object; {printable(first)}")


MAX_SHAPES = 1000
MAX_NAME = 40
TYPO = 0.8  # similarity from which a name is a misspelled one: `splt` for `split`, but not `long` for `lang`


def check_names(
    where: str, kind: str, names: Iterable[str], valid_names: Sequence[str], *, refuse_typos: bool = True
) -> list[str]:
    """Return the names that are not valid, which a reader ignores.

    Args:
        where: file and line, for messages.
        kind: of name: column or key.

    Raises:
        DataError: with `refuse_typos`, a name is nearly one of the valid ones that are missing, so it is probably a
            misspelled one.
    """
    names = list(names)
    unknown = [name for name in names if name and name not in valid_names and len(name) <= MAX_NAME]
    missing = [name for name in valid_names if name not in names]
    # A name that is close to a missing column is most likely a typo; close to none, it is an extra column.
    for name in unknown:
        if refuse_typos and (near := find_typo(name, missing)):
            raise DataError(f"{where}: unknown {kind} `{printable(name)}`; did you mean `{near}`?")
    return [printable(name) for name in unknown]


def find_typo(name: str, valid_names: Iterable[str]) -> str:
    """Return the valid name that `name` is a misspelling, another case or a longer form of; empty otherwise."""
    lower, valid_names = name.strip().lower(), list(valid_names)
    for valid_name in valid_names:
        # Same letters in another order, or the name with more letters: `spilt`, `captions`.
        is_longer = lower.startswith(valid_name) and lower[len(valid_name) :].isalpha()
        if sorted(lower) == sorted(valid_name) or is_longer:
            return valid_name
    return next(iter(difflib.get_close_matches(lower, valid_names, n=1, cutoff=TYPO)), "")


def require_directory(base: Path, root: str, way_out: str) -> Path:
    """Return the dataset's directory.

    Raises:
        DataError: it does not exist; the message ends with `way_out`, how to get the data.
    """
    path = base / root
    if not path.is_dir():
        raise DataError(f"{path.absolute()}: no such directory; {way_out}")
    return path


MAX_RECORD_LINES = 50  # for a text with line breaks


def read_csv(
    path: Path,
    tables: Tables,
    table: str,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    *,
    delimiter: str = ",",
    refuse_typos: bool = True,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (provenance, row) of each record: `captions.txt:12`, its first line.

    White space around column names is ignored, and so is the case of `needed` and `optional` ones. If there are
    `optional` ones, other columns are added to `tables.ignored`. A header that is repeated, as in joined files, is no
    row.

    Args:
        delimiter: the usual one; a file whose first line has the needed columns with `;`, a tab or `,` is read so.
        refuse_typos: whether a column that is nearly an `optional` one is an error.

    Raises:
        DataError: the file is missing or empty, names a column twice, lacks one of the `needed` columns, or has a
            misspelled `optional` one.
    """
    # csv needs line ends to find cells of several lines
    lines = (line + "\n" for line in open_lines(path, "a csv with a header", universal=True))
    first_line = next(lines, "")
    delimiter = delimiter_of(first_line, needed, delimiter)
    standard_names = {name.lower(): name for name in (*needed, *optional)}
    header: list[str] = []
    for number, cells in _parse(itertools.chain([first_line], lines), delimiter, path, tables, table):
        provenance = f"{path.name}:{number}"
        if not any(cell.strip() for cell in cells):
            continue
        if not header or cells[0].strip().lower() == header[0].lower():
            names = [standard_names.get(cell.strip().lower(), cell.strip()) for cell in cells]
            if names == header:
                tables.skipped["repeated header lines"] += 1
                continue
        if not header:
            header = names
            # with two columns of one name, the second would win silently
            twice = [column for column, count in Counter(header).items() if column and count > 1]
            if twice:
                raise DataError(
                    f"{path}:{number}: the column {twice[0]!r} is named twice; rename or delete one of them"
                )
            if optional:
                valid_names = (*needed, *optional)
                tables.ignored.update(
                    check_names(f"{path}:{number}", "column", header, valid_names, refuse_typos=refuse_typos)
                )
            if not set(needed) <= set(header):
                more = f" (and may name {', '.join(optional)})" if optional else ""
                raise DataError(
                    f"{path}:{number}: the first line must name the columns {', '.join(needed)}{more}, separated by "
                    f"{delimiter!r}; found {', '.join(map(repr, cells))[:200]}"
                )
        elif len(cells) != len(header):
            reason = f"{len(cells)} fields, the header has {len(header)}; a text with {delimiter!r} needs quotes"
            tables.quarantine(table, "", "record_readable", reason, provenance)
        else:
            yield provenance, dict(zip(header, cells, strict=True))
    if not header:
        state = "no line can be read" if first_line.strip() else "empty"
        raise DataError(f"{path}: {state}; expected a header line that names {', '.join(needed)}")


def delimiter_of(first_line: str, needed: Sequence[str], usual: str) -> str:
    """Return what separates the needed columns in a header: spreadsheets of many countries write `;`."""
    for delimiter in (usual, ";", "\t", ","):
        if set(needed) <= {name.strip(' "\n').lower() for name in first_line.split(delimiter)}:
            return delimiter
    return usual


def _parse(
    lines: Iterator[str], delimiter: str, path: Path, tables: Tables, table: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of each record.

    A line with broken quoting costs only that line, not the lines its quote swallows. With tabs such a line is read as
    written: most tools that write tabs know no quoting, and a text may start with a quotation mark.
    """
    ahead = _Ahead(lines)
    while ahead:
        # A new reader after each error, from the next line on.
        reader = csv.reader(ahead, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                # a cell of several lines with tabs has swallowed whole lines
                if delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in row):
                    raise csv.Error("a quote swallows the fields of other lines")
                yield ahead.first, row
                # the record is complete: its lines need not be read again
                ahead.drop(reader.line_num)
            return
        except csv.Error as error:
            if delimiter == "\t":
                yield ahead.first, ahead.drop_one().rstrip("\n").split("\t")
                continue
            tables.quarantine(table, "", "record_readable", f"broken quoting: {error}", f"{path.name}:{ahead.first}")
            ahead.drop_one()


class _Ahead:
    """An iterator over lines that keeps those of the current record, so that they can be read again."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._record: list[str] = []  # lines of the current record that were read
        self._position = 0  # how many of them this pass has returned
        self._dropped = 0  # lines of completed records, in this pass
        self.first = 1  # line number of the record's first line

    def __bool__(self) -> bool:
        """Return whether any line is left."""
        self._position = self._dropped = 0
        if not self._record:
            self._record = [line for line in (next(self._lines, None),) if line is not None]
        return bool(self._record)

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> str:
        """Return the next line.

        A record of too many lines is broken; otherwise an open quote would consume the rest of the file.
        """
        if self._position >= MAX_RECORD_LINES:
            raise csv.Error(f"a quote is open for {MAX_RECORD_LINES} lines")
        # Replay the lines of the current record before reading on.
        if self._position == len(self._record):
            self._record.append(next(self._lines))
        self._position += 1
        return self._record[self._position - 1]

    def drop(self, read: int) -> None:
        """End a record; `read` lines were read since this pass began."""
        # `read` counts from the start of the pass; lines before were dropped already
        count = read - self._dropped
        self._record, self._position, self._dropped = self._record[count:], self._position - count, read
        self.first += count

    def drop_one(self) -> str:
        """Return the record's first line, which is broken; the next line starts another record."""
        broken, *self._record = self._record
        self.first += 1
        return broken
