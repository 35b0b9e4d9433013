"""CSV files with a header and quotes: the rows as dicts, and a line with broken quoting costs that line alone."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from vlp_models.data.formats.base import Tables, read_text
from vlp_models.errors import DataError

MAX_RECORD_LINES = 50  # of a text that has line breaks


def read_csv(path: Path, tables: Tables, table: str, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(provenance, row) of each record: `captions.txt:12`, its first line. Column names lose their white space.

    Raises:
        DataError: the file is missing or empty, or lacks one of the `needed` columns.
    """
    header: list[str] = []
    for number, cells in _records(path, tables, table):
        provenance = f"{path.name}:{number}"
        if not header:
            header = [cell.strip() for cell in cells]
            missing = [column for column in needed if column not in header]
            if missing:
                raise DataError(
                    f"{path}:{number}: the first line must name the columns {', '.join(needed)}; "
                    f"found {', '.join(map(repr, cells))[:200]}"
                )
        elif len(cells) != len(header):
            reason = f"{len(cells)} fields, the header has {len(header)}; a text that holds a comma needs quotes"
            tables.set_aside(table, "", "record_readable", reason, provenance)
        else:
            yield provenance, dict(zip(header, cells, strict=True))
    if not header:
        raise DataError(f"{path}: empty; expected a header line that names {', '.join(needed)}")


def _records(path: Path, tables: Tables, table: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells). A record goes on over lines until its quotes are even; one that goes on too long is broken."""
    text = read_text(path, "a csv with a header").replace("\r\n", "\n").replace("\r", "\n")
    lines = [f"{line}\n" for line in text.split("\n")]
    start = 0
    while start < len(lines):
        if not lines[start].strip():
            start += 1
            continue
        end, quotes = start + 1, lines[start].count('"')
        while quotes % 2 and end < len(lines) and end - start < MAX_RECORD_LINES:
            quotes += lines[end].count('"')
            end += 1
        try:
            if quotes % 2:
                raise csv.Error("a quote that is not closed")
            (cells,) = csv.reader(lines[start:end], strict=True)
        except (csv.Error, ValueError) as error:
            tables.set_aside(table, "", "record_readable", f"broken quoting: {error}", f"{path.name}:{start + 1}")
            end = start + 1
        else:
            yield start + 1, cells
        start = end
