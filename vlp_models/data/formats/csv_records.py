"""CSV files with a header and quotes: the rows as dicts, and a line with broken quoting costs that line alone."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from vlp_models.data.formats.base import Tables, open_lines
from vlp_models.errors import DataError

MAX_RECORD_LINES = 50  # of a text that has line breaks


def read_csv(
    path: Path,
    tables: Tables,
    table: str,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    *,
    delimiter: str = ",",
) -> Iterator[tuple[str, dict[str, str]]]:
    """(provenance, row) of each record: `captions.txt:12`, its first line. White space around the names of columns does
    not count, nor does the case of those that are `needed` or `optional`.

    Raises:
        DataError: the file is missing or empty, or lacks one of the `needed` columns.
    """
    lines = (line + "\n" for line in open_lines(path, "a csv with a header", universal=True))
    ours = {name.lower(): name for name in (*needed, *optional)}
    header: list[str] = []
    for number, cells in _parse(lines, delimiter, path, tables, table):
        provenance = f"{path.name}:{number}"
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = [ours.get(cell.strip().lower(), cell.strip()) for cell in cells]
            if not set(needed) <= set(header):
                more = f" (and may name {', '.join(optional)})" if optional else ""
                raise DataError(
                    f"{path}:{number}: the first line must name the columns {', '.join(needed)}{more}, separated by "
                    f"{delimiter!r}; found {', '.join(map(repr, cells))[:200]}"
                )
        elif len(cells) != len(header):
            reason = f"{len(cells)} fields, the header has {len(header)}; a text that holds {delimiter!r} needs quotes"
            tables.set_aside(table, "", "record_readable", reason, provenance)
        else:
            yield provenance, dict(zip(header, cells, strict=True))
    if not header:
        raise DataError(f"{path}: empty; expected a header line that names {', '.join(needed)}")


def _parse(
    lines: Iterator[str], delimiter: str, path: Path, tables: Tables, table: str
) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each record. A line with broken quoting costs that line, not those its quote swallows. Between
    tabs it is taken as written: most that write them know no quoting, and a text may begin with what somebody says."""
    ahead = _Ahead(lines)
    while ahead:
        reader = csv.reader(ahead, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in row):
                    raise csv.Error("a quote swallows the fields of other lines")
                yield ahead.first, row
                ahead.drop(reader.line_num)
            return
        except csv.Error as error:
            if delimiter == "\t":
                yield ahead.first, ahead.drop_one().rstrip("\n").split("\t")
                continue
            tables.set_aside(table, "", "record_readable", f"broken quoting: {error}", f"{path.name}:{ahead.first}")
            ahead.drop_one()


class _Ahead:
    """Lines, of which those of the record under way are kept, so that they can be read again."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._record: list[str] = []  # the lines of the record under way that were read
        self._place = 0  # how many of them this pass has seen
        self._dropped = 0  # lines of finished records, in this pass
        self.first = 1  # the number of the record's first line

    def __bool__(self) -> bool:
        """Whether any line is left."""
        self._place = self._dropped = 0
        if not self._record:
            self._record = [line for line in (next(self._lines, None),) if line is not None]
        return bool(self._record)

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> str:
        """The next line; a record that reaches too far is broken, or each open quote would cost all that follows."""
        if self._place >= MAX_RECORD_LINES:
            raise csv.Error(f"a quote is open for {MAX_RECORD_LINES} lines")
        if self._place == len(self._record):
            self._record.append(next(self._lines))
        self._place += 1
        return self._record[self._place - 1]

    def drop(self, read: int) -> None:
        """A record ends; `read` lines were read since this pass began."""
        count = read - self._dropped
        self._record, self._place, self._dropped = self._record[count:], self._place - count, read
        self.first += count

    def drop_one(self) -> str:
        """The record's first line is broken, and returned: the next one begins another."""
        broken, *self._record = self._record
        self.first += 1
        return broken
