"""Tables with a row for each item: csv, tsv, xlsx, and rows of JSON; also those of VLMEvalKit."""

from __future__ import annotations

import ast
import csv
import functools
import math
import re
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
    limit = csv.field_size_limit(64 << 20)  # an image may stand in a column; the limit is that of the whole process
    try:
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
    numbers, rows = _as_rows(
        enumerate(lines, 1 + (sheet.start or (0, 0))[0])
    )  # lines: from the first that is not empty
    return read_rows(path, rows, columns, numbers)


def _check_cells(archive: zipfile.ZipFile) -> None:
    """
    Raises:
        ValueError: a sheet has one cell so far from the first that the range between them does not fit into memory.
    """
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
    row, cell, last_row, last_column = 0, (0, 0), 0, 0  # a cell or row without a place is next to the one before

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal row, cell, last_row, last_column
        name, place = name.rpartition(":")[2], attributes.get("r", "")
        if name == "row":
            row = int(place) if place else row + 1
            cell = row, 0
        elif name == "c":
            cell = row, cell[1] + 1
            if place:
                found = re.fullmatch(r"([A-Za-z]+)([0-9]+)", place)
                if found is None:
                    raise ValueError(f"{place!r} is not a cell")
                column = functools.reduce(lambda value, letter: 26 * value + ord(letter) - 64, found[1].upper(), 0)
                cell = int(found[2]), column
        elif name in ("v", "is"):
            last_row, last_column = max(last_row, cell[0]), max(last_column, cell[1])

    def refuse(*_: Any) -> None:
        raise ValueError("a worksheet with a document type")  # which could give cells other places

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.StartDoctypeDeclHandler = start, refuse
    parser.Parse(sheet, True)
    return last_row, last_column


def _as_rows(lines: Iterable[tuple[int, Sequence[Any]]]) -> tuple[list[int], list[Row]]:
    """Return the line numbers of a table's rows, and the rows by the names in its first line, without empty ones.

    Args:
        lines: with their numbers in the file.

    Raises:
        ValueError: two columns have one name, or a row has more cells than there are names.
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
        if any(cell not in ("", None) for cell in line):
            numbers.append(number)
            rows.append(dict(zip(names, line, strict=False)))
    return numbers, rows


def read_rows(path: Path, rows: Sequence[Row], columns: Columns, numbers: Sequence[int] = ()) -> list[Run]:
    """Return the runs of a table's rows, by their `model` and `seed`. numbers: of their lines; default: 1, 2, ..."""
    if not rows:
        raise ValueError("empty")
    known = list(rows[0])
    item = _column(columns.item, ITEM_NAMES, known, "item")
    score = _column(columns.score, SCORE_NAMES, known, "score")
    cluster = columns.cluster or first_named(CLUSTER_NAMES, rows)
    if cluster and cluster not in known:
        raise ValueError(f"no column {cluster}; there are: {', '.join(known)}")
    runs: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        key = (text(row.get("model")), text(row.get("seed")))
        runs.setdefault(key, {}).setdefault(text(row.get("metric")) or score, []).append(row)
    lines = numbers or range(1, len(rows) + 1)
    number_of = {id(row): _table_score(path, row, score, line) for row, line in zip(rows, lines, strict=True)}
    of_vlmevalkit = item == "index" and "prediction" in known
    not_judged = of_vlmevalkit and {number for number in number_of.values() if number < 0} == {NOT_JUDGED}
    found = []
    for (model, seed), metrics in runs.items():
        scored, unscored = {}, []
        for name, own in metrics.items():
            pairs = [(row, number_of[id(row)]) for row in own]
            kept = [(row, n) for row, n in pairs if not (math.isnan(n) or (not_judged and n == NOT_JUDGED))]
            if len(kept) < len(pairs):
                with_score = {id(row) for row, _ in kept}
                unscored.append(explain_unscored(name, [text(r.get(item)) for r in own if id(r) not in with_score]))
            if kept:
                scored[name] = score_items([row for row, _ in kept], [number for _, number in kept], item, cluster)
        notes = [f"items: {item}", f"scores: {score}", explain_clusters(cluster), *unscored]
        if not_judged:
            notes.append("a score of -1 is VLMEvalKit's for an answer that was not judged")
        found.append(Run(model=model, seed=seed, source=path, metrics=scored, notes=notes))
    return found


def _table_score(path: Path, row: Row, column: str, line: int) -> float:
    """Return a row's score; NaN if its cell is empty.

    VLMEvalKit's `eval_score` is the mean of `eval_match`, for some datasets a distance. The score is computed from the
    latter as VLMEvalKit's own totals are (`hit_calculate`): the dataset is in the file's name.

    Raises:
        ValueError: the cell has something else than a number.
    """
    if column == "eval_score" and row.get("eval_match") not in ("", None):
        matches = row["eval_match"]
        matches = [float(one) for one in (ast.literal_eval(matches) if isinstance(matches, str) else matches)]
        if any(name in path.name for name in ("DocVQA", "InfoVQA")):
            similarity = 1 - min(matches)  # ANLS, with its threshold
            return similarity if similarity >= 0.5 else 0.0
        return max(matches) if any(name in path.name for name in ("ChartQA", "OCRVQA")) else sum(matches) / len(matches)
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    words = {"true": 1.0, "false": 0.0}
    number = to_float(words.get(value.strip().lower(), value) if isinstance(value, str) else value)
    if number is None:
        raise ValueError(f"line {line}: {column} is {value!r}, not a number")
    return number


def _column(stated: str, usual: Iterable[str], known: Sequence[str], option: str) -> str:
    found = stated if stated in known else "" if stated else next((name for name in usual if name in known), "")
    if not found:
        missing = f"no column {stated}" if stated else f"no column {' or '.join(usual)}"
        raise ValueError(f"{missing}; there are: {', '.join(map(str, known))}. Name one with --{option}")
    return found
