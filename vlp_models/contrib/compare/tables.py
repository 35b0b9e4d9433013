"""Tables with a row for each item: csv, tsv, xlsx, and rows of JSON; also those of VLMEvalKit."""

from __future__ import annotations

import ast
import csv
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.parsers import expat

from vlp_models.common.io import read_zip_member
from vlp_models.contrib.compare.scored import (
    CLUSTER_NAMES,
    ITEM_NAMES,
    SCORE_NAMES,
    Columns,
    Row,
    Run,
    check_size,
    explain_clusters,
    explain_unscored,
    first_named,
    score_items,
    text,
    to_float,
)
from vlp_models.errors import MissingToolError

MAX_CELLS = 50_000_000  # of a spreadsheet's range, which is read as a whole
NOT_JUDGED = -1.0  # in the tables of VLMEvalKit


def read_csv(path: Path, columns: Columns) -> list[Run]:
    limit = csv.field_size_limit(64 << 20)  # a column may have images; the limit holds for the whole process
    try:
        # `newline=""` leaves line ends to the csv module: a quoted cell may contain some.
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            numbers, rows = _as_rows((lines.line_num, line) for line in lines)
    finally:
        csv.field_size_limit(limit)
    return read_rows(path, rows, columns, numbers)


def read_xlsx(path: Path, columns: Columns) -> list[Run]:
    try:
        from python_calamine import CalamineWorkbook
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs python-calamine: pip install python-calamine") from None
    with zipfile.ZipFile(path) as archive:
        check_size(path, archive)
        _check_cells(archive)
    try:
        sheet = CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0)
        lines = sheet.to_python()
    except Exception as error:  # the library has an error class for each kind of damage
        raise ValueError(str(error)) from None
    first = 1 + (sheet.start or (0, 0))[0]  # calamine skips the empty lines before it
    numbers, rows = _as_rows(enumerate(lines, first))
    return read_rows(path, rows, columns, numbers)


def _check_cells(archive: zipfile.ZipFile) -> None:
    """Refuse a sheet with a cell so far from the first that the range between them does not fit into memory."""
    # Parts of xlsb and ods: only the XML of xlsx is checked below, so their cells would go unchecked.
    names = {name.lower() for name in archive.namelist()}
    if "xl/workbook.bin" in names or "content.xml" in names:
        raise ValueError("a workbook of another format; save it as xlsx")
    for member in archive.infolist():
        content = read_zip_member(archive, member)
        if b"sheetData" in content:  # a worksheet, which may have any name
            last_row, last_column = _last_cell(content)
            if last_row * last_column > MAX_CELLS:
                raise ValueError(
                    f"{member.filename} has cells up to row {last_row:,} and column {last_column:,}: more than "
                    f"{MAX_CELLS:,} cells, although most are empty"
                )


def _last_cell(sheet: bytes) -> tuple[int, int]:
    """Return the last row and the last column of a worksheet's cells with content, counted from 1."""
    row, cell, last_row, last_column = 0, (0, 0), 0, 0

    # Called by the parser at every start of an element, in document order.
    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal row, cell, last_row, last_column
        # A row or cell without a reference follows the previous one.
        # Names may have a namespace prefix, such as `x:row`.
        name, reference = name.rpartition(":")[2], attributes.get("r", "")
        if name == "row":
            row = int(reference) if reference else row + 1
            cell = row, 0
        elif name == "c" and not reference:
            cell = row, cell[1] + 1
        elif name == "c":
            letters = reference.rstrip("0123456789")
            column = 0
            # Columns count in base 26 with A as 1: Z is 26 and AA is 27.
            for letter in letters.upper():
                column = 26 * column + ord(letter) - 64
            cell = int(reference[len(letters) :]), column
        elif name in ("v", "is"):  # a value; cells that are only formatted have none
            last_row, last_column = max(last_row, cell[0]), max(last_column, cell[1])

    def refuse(*_: Any) -> None:
        raise ValueError("a worksheet with a document type")  # which could give cells other references

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.StartDoctypeDeclHandler = start, refuse
    parser.Parse(sheet, True)
    return last_row, last_column


def _as_rows(lines: Iterable[tuple[int, Sequence[Any]]]) -> tuple[list[int], list[Row]]:
    """Return the line numbers of a table's rows, and the rows by the names in its first line, without empty ones.

    Args:
        lines: with their numbers in the file.
    """
    remaining = iter(lines)
    names = [str(name).strip() for name in next(remaining, (0, ()))[1]]
    if repeated := {name for name in names if name and names.count(name) > 1}:
        raise ValueError(f"several columns are called {', '.join(sorted(repeated))}")
    numbers: list[int] = []
    rows: list[Row] = []
    for number, line in remaining:
        if len(line) > len(names):
            raise ValueError(f"line {number} has {len(line)} cells, but there are {len(names)} columns")
        # Lines without content, frequent at the end of spreadsheets, are no rows.
        if any(cell not in ("", None) for cell in line):
            numbers.append(number)
            rows.append(dict(zip(names, line, strict=False)))
    return numbers, rows


def read_rows(path: Path, rows: Sequence[Row], columns: Columns, numbers: Sequence[int] = ()) -> list[Run]:
    """Return the runs of a table's rows, by their `model` and `seed`. numbers: of their lines; default: 1, 2, ..."""
    if not rows:
        raise ValueError("empty")
    names = list(rows[0])
    item = _column(columns.item, ITEM_NAMES, names, "item")
    score = _column(columns.score, SCORE_NAMES, names, "score")
    cluster = columns.cluster or first_named(CLUSTER_NAMES, rows)
    if cluster and cluster not in names:
        raise ValueError(f"no column {cluster}; there are: {', '.join(names)}")
    lines = numbers or range(1, len(rows) + 1)
    values = [_table_score(path, row, score, line) for row, line in zip(rows, lines, strict=True)]
    negative = {value for value in values if value < 0}
    # Only if -1 is the one negative value: otherwise it is a score like the others.
    not_judged = item == "index" and "prediction" in names and negative == {NOT_JUDGED}  # a table of VLMEvalKit
    if not_judged:
        values = [math.nan if value == NOT_JUDGED else value for value in values]
    # (model, seed) -> metric -> its rows and their scores; NaN: no score
    tables: dict[tuple[str, str], dict[str, list[tuple[Row, float]]]] = {}
    for row, value in zip(rows, values, strict=True):
        metrics = tables.setdefault((text(row.get("model")), text(row.get("seed"))), {})
        metrics.setdefault(text(row.get("metric")) or score, []).append((row, value))
    runs = []
    for (model, seed), metrics in tables.items():
        notes = [f"items: {item}", f"scores: {score}", explain_clusters(cluster)]
        scored = {}
        for name, pairs in metrics.items():
            if unscored := [text(row.get(item)) for row, value in pairs if math.isnan(value)]:
                notes.append(explain_unscored(name, unscored))
            pairs = [(row, value) for row, value in pairs if not math.isnan(value)]
            if pairs:
                scored[name] = score_items([row for row, _ in pairs], [value for _, value in pairs], item, cluster)
        if not_judged:
            notes.append("a score of -1 is VLMEvalKit's for an answer that was not judged")
        runs.append(Run(model=model, seed=seed, source=path, metrics=scored, notes=notes))
    return runs


def _table_score(path: Path, row: Row, column: str, line: int) -> float:
    """Return a row's score; NaN if its cell is empty.

    VLMEvalKit's `eval_score` is the mean of `eval_match`, for some datasets a distance. The score is computed from the
    latter as VLMEvalKit's own totals are (`hit_calculate`): the dataset is in the file's name.
    """
    # VLMEvalKit keeps the match of each reference answer: the best one counts, or their mean.
    if column == "eval_score" and row.get("eval_match") not in ("", None):
        cell = row["eval_match"]
        matches = [float(match) for match in (ast.literal_eval(cell) if isinstance(cell, str) else cell)]
        if any(name in path.name for name in ("DocVQA", "InfoVQA")):
            # A match is a distance from 0 to 1: the nearest reference counts, and similarities below 0.5 count as 0.
            similarity = 1 - min(matches)  # ANLS, with its threshold
            return similarity if similarity >= 0.5 else 0.0
        # Any reference answer that matches is enough.
        if any(name in path.name for name in ("ChartQA", "OCRVQA")):
            return max(matches)
        return sum(matches) / len(matches)
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    if isinstance(value, str):
        value = {"true": 1.0, "false": 0.0}.get(value.strip().lower(), value)
    number = to_float(value)
    if number is None:
        raise ValueError(f"line {line}: {column} is {value!r}, not a number")
    return number


def _column(stated: str, usual: Iterable[str], names: Sequence[str], option: str) -> str:
    """Return the stated column, or else the first of the usual ones that the table has."""
    candidates = [stated] if stated else list(usual)
    for name in candidates:
        if name in names:
            return name
    there_are = ", ".join(map(str, names))
    raise ValueError(f"no column {' or '.join(candidates)}; there are: {there_are}. Name one with --{option}")
