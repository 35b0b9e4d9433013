"""Tables with a row for each item: csv, tsv, xlsx, and rows of JSON; also those of VLMEvalKit."""

from __future__ import annotations

import ast
import csv
import itertools
import math
import operator
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.io import read_zip_member
from vlp_models.contrib.compare.scored import (
    CLUSTER_NAMES,
    ITEM_NAMES,
    SCORE_NAMES,
    Columns,
    Row,
    Run,
    Scored,
    check_size,
    explain_clusters,
    explain_unscored,
    first_named,
    id_texts,
    score_items,
    texts,
    to_float,
)
from vlp_models.errors import MissingToolError
from vlp_models.metrics.bootstrap import group_rows
from vlp_models.metrics.score import FloatArray

IntArray = NDArray[np.intp]

MAX_CELLS = 50_000_000  # of a spreadsheet's range, which is read as a whole
NOT_JUDGED = -1.0  # in the tables of VLMEvalKit
CIRCULAR = ("mmbench", "ccbench", "circular", "mmcr")  # in the names of VLMEvalKit's datasets with rotated options
CONTENTS = ("doc_hash", "question")  # columns that identify what an item is about
SEPARATOR_LINE = re.compile(r"sep=(.)", re.IGNORECASE)  # first line of a csv file that a spreadsheet wrote
# How spreadsheets and scripts in several languages name a row about the others: `Mean score:`, `Overall accuracy (%)`.
SUMMARY = re.compile(
    r"((grand|macro|micro|weighted) )?"
    r"(overall|all|average|avg\.?|mean|total|sum|summary|median|count|min|max|minimum|maximum|std\.?|stdev|"
    r"std\.? ?dev\.?|sd|standard deviation|gesamt|summe|mittelwert|durchschnitt|moyenne|promedio|media|"
    r"média|totale|итого|среднее|平均|平均值|合计|合計|总计|總計|Σ|∑|μ|σ)"
    r"( (score|accuracy|items))?( ?\(.*\))?:?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Rows of a file.

    column         returns the cells of a column; None where a row lacks it
    lines          number of each row's line in the file
    decimal_comma  texts such as 0,5 are numbers
    """

    names: Sequence[str]
    column: Callable[[str], list[Any]]
    lines: Sequence[int]
    decimal_comma: bool = False

    def row(self, number: int) -> Row:
        return {name: self.column(name)[number] for name in self.names}


def read_csv(path: Path, columns: Columns) -> list[Run]:
    limit = csv.field_size_limit(64 << 20)  # a column may have images; the limit holds for the whole process
    try:
        # `newline=""` leaves line ends to the csv module: a quoted cell may contain some.
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter, start = _delimiter(path, file)
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            rows = list(lines)
            numbers: Sequence[int] = range(start, start + len(rows))
            if lines.line_num != len(rows):  # a cell has several lines: each row is named by its last one
                with path.open(encoding="utf-8-sig", newline="") as again:
                    _delimiter(path, again)
                    lines = csv.reader(again, delimiter=delimiter, strict=True)
                    numbers = [lines.line_num + start - 1 for _ in lines]
            table = _as_table(numbers, rows, decimal_comma=delimiter != ",")
    finally:
        csv.field_size_limit(limit)
    return read_table(path, table, columns)


def _delimiter(path: Path, file: TextIO) -> tuple[str, int]:
    """Return what separates the cells and the number of the line of names, and leave the file there.

    Spreadsheets write semicolons where the comma is the decimal sign, some after a line `sep=;`.
    """
    first = file.readline()
    if stated := SEPARATOR_LINE.fullmatch(first.strip()):
        return stated[1], 2
    file.seek(0)
    if path.suffix.lower() == ".tsv":
        return "\t", 1

    def usual_names(delimiter: str) -> tuple[int, int]:
        names = next(csv.reader([first], delimiter=delimiter), [])
        usual = {*ITEM_NAMES, *SCORE_NAMES, *CLUSTER_NAMES}
        return len(usual.intersection(map(str.strip, names))), len(names)

    return max(",;\t", key=usual_names), 1  # the comma if no other has more


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
    return read_table(path, _as_table(range(first, first + len(lines)), lines), columns)


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


def _as_table(numbers: Sequence[int], lines: Sequence[Sequence[Any]], *, decimal_comma: bool = False) -> Table:
    """Return a table of lines; the first one has the names.

    Args:
        numbers: of the lines in the file.
    """
    names = [str(name).strip() for name in lines[0]] if lines else []
    if repeated := {name for name in names if name and names.count(name) > 1}:
        raise ValueError(f"several columns are called {', '.join(sorted(repeated))}")
    numbers, rows = numbers[1:], lines[1:]
    # Lines without content, frequent at the end of spreadsheets, are no rows. `any` is quick, and False of a number 0.
    if not all(map(any, rows)):
        filled = [i for i, row in enumerate(rows) if any(cell not in ("", None) for cell in row)]
        numbers, rows = [numbers[i] for i in filled], [rows[i] for i in filled]
    widths = set(map(len, rows))
    if max(widths, default=0) > len(names):
        number, row = next((number, row) for number, row in zip(numbers, rows, strict=True) if len(row) > len(names))
        raise ValueError(f"line {number} has {len(row)} cells, but there are {len(names)} columns")
    if min(widths, default=len(names)) < len(names):
        rows = [[*row, *[None] * (len(names) - len(row))] for row in rows]

    def column(name: str) -> list[Any]:
        return list(map(operator.itemgetter(names.index(name)), rows))

    return Table(names=names, column=column, lines=numbers, decimal_comma=decimal_comma)


def read_rows(path: Path, rows: Sequence[Row], columns: Columns, lines: Sequence[int] = ()) -> list[Run]:
    """Return the runs of rows of JSON. lines: their numbers; default: 1, 2, ..."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))

    def column(name: str) -> list[Any]:
        return [row.get(name) for row in rows]

    table = Table(names=names, column=column, lines=lines or range(1, len(rows) + 1))
    return read_table(path, table, columns)


def read_table(path: Path, table: Table, columns: Columns) -> list[Run]:
    """Return the runs of a table, by its columns `model` and `seed`."""
    if not table.lines:
        raise ValueError("empty")
    names = table.names
    item = _column(columns.item, ITEM_NAMES, names, "item")
    score = _column(columns.score, SCORE_NAMES, names, "score")
    cluster = columns.cluster or first_named([name for name in CLUSTER_NAMES if name in names], table.column)
    if cluster and cluster not in names:
        raise ValueError(f"no column {cluster}; there are: {', '.join(names)}")
    items = id_texts(table.column(item))
    clusters = id_texts(table.column(cluster)) if cluster else []
    questions = [] if columns.item else _questions(path, table, item, items)
    # White space differs between a spreadsheet, in which a carriage return is _x000D_, and text.
    contents = {
        name: [" ".join(cell.replace("_x000D_", " ").split()) for cell in texts(table.column(name))]
        for name in CONTENTS
        if name in names
    }
    groups = _groups(table, score)
    summaries = {row for metrics in groups.values() for rows in metrics.values() for row in _summary_rows(items, rows)}
    cells = _score_cells(path, table, score)
    for row in summaries:
        cells[row] = None
    values_N = _numbers(table, score, cells)
    table_notes = [f"items: {item}", f"scores: {score}", explain_clusters(cluster)]
    if table.decimal_comma and any(isinstance(cell, str) and "," in cell for cell in cells):
        table_notes.append("numbers with a decimal comma")
    # Only if -1 is the one negative value: otherwise it is a score like the others.
    negatives = set(values_N[values_N < 0].tolist())
    if item == "index" and "prediction" in names and negatives == {NOT_JUDGED}:  # a table of VLMEvalKit
        values_N[values_N == NOT_JUDGED] = math.nan
        table_notes.append("a score of -1 is VLMEvalKit's for an answer that was not judged")

    def score_rows(metric: str, rows_N: IntArray) -> tuple[Scored | None, list[str]]:
        """Return the scores of these rows; None if they have none."""
        notes: list[str] = []
        labels: Sequence[str] = items
        values_M = values_N[rows_N]
        # (N,) -> (M,): rotations of a question become one item, at the row of the first.
        if questions and (merged := _merge_rotations(_take(questions, rows_N), values_M)):
            first_M, values_M = merged
            notes.append(
                f"{len(rows_N):,} rotations of {len(first_M):,} questions, each right if all its rotations are"
            )
            labels, rows_N = questions, rows_N[first_M]
        is_scored_M = ~np.isnan(values_M)
        if not is_scored_M.all():
            notes.append(explain_unscored(metric, _take(labels, rows_N[~is_scored_M])))
            rows_N, values_M = rows_N[is_scored_M], values_M[is_scored_M]
        if not len(rows_N):
            return None, notes
        scored = score_items(
            _take(labels, rows_N),
            values_M,
            _take(clusters, rows_N) if cluster else [],
            item=item,
            cluster=cluster,
            row_at=lambda i: table.row(rows_N[i]),
            contents={name: _take(column, rows_N) for name, column in contents.items()},
        )
        return scored, notes

    runs = []
    for (model, seed), metrics in groups.items():
        run = Run(model=model, seed=seed, source=path, metrics=(by_metric := {}), notes=(notes := [*table_notes]))
        for metric, rows in metrics.items():
            for row in sorted(summaries.intersection(rows)):
                notes.append(f"line {table.lines[row]}, {items[row]}: taken for a summary of the others, and left out")
            items_only = [row for row in rows if row not in summaries] if summaries else rows
            scored, part_notes = score_rows(metric, np.array(items_only, dtype=np.intp))
            notes += part_notes
            if scored:
                by_metric[metric] = scored
        runs.append(run)
    return runs


def _take(cells: Sequence[str], rows_N: IntArray) -> Sequence[str]:
    """Return the cells of these rows."""
    if len(rows_N) == len(cells) and np.array_equal(rows_N, np.arange(len(cells))):  # all, most of the time
        return cells
    return [cells[row] for row in rows_N.tolist()]


def _groups(table: Table, score: str) -> dict[tuple[str, str], dict[str, Sequence[int]]]:
    """Return the numbers of the rows of each (model, seed) and metric."""
    names = ("model", "seed", "metric")
    if not any(name in table.names for name in names):
        return {("", ""): {score: range(len(table.lines))}}
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    # A column that is missing is empty.
    columns = [texts(table.column(name)) if name in table.names else [""] * len(table.lines) for name in names]
    for row, (model, seed, metric) in enumerate(zip(*columns, strict=True)):
        groups.setdefault((model, seed), {}).setdefault(metric or score, []).append(row)
    return groups


def _summary_rows(items: Sequence[str], rows: Sequence[int]) -> list[int]:
    """Return the rows at the start and at the end that are named like a total of the others."""

    def is_summary(row: int) -> bool:
        return SUMMARY.fullmatch(items[row]) is not None

    return [*itertools.takewhile(is_summary, rows), *itertools.takewhile(is_summary, reversed(rows))]


def _questions(path: Path, table: Table, item: str, items: Sequence[str]) -> Sequence[str]:
    """Return the question of each row of VLMEvalKit's circular evaluation; nothing for other tables.

    It asks a question again with its options rotated. The rotations have one `g_index`, or else an index that is larger
    by a multiple of a million.
    """
    if item != "index":
        return []
    if "g_index" in table.names:
        return [question or name for question, name in zip(id_texts(table.column("g_index")), items, strict=True)]
    if any(name in path.name.lower() for name in CIRCULAR) and all(map(str.isdigit, items)):
        return [str(int(name) % 1_000_000) for name in items]
    return []


def _merge_rotations(questions: Sequence[str], values_N: FloatArray) -> tuple[IntArray, FloatArray] | None:
    """Return the first row and the score of each question: 1 if all rotations are right.

    None if no question has several, or if scores are other than right and wrong.
    """
    names, question_N = group_rows(questions)
    if len(names) == len(questions) or not np.isin(values_N[~np.isnan(values_N)], (0, 1)).all():
        return None
    values_M = np.ones(len(names))
    np.minimum.at(values_M, question_N, values_N)  # NaN, a rotation that was not judged, stays
    return np.unique(question_N, return_index=True)[1], values_M


def _score_cells(path: Path, table: Table, score: str) -> list[Any]:
    """Return the cells of the scores.

    VLMEvalKit's `eval_score` is the mean of `eval_match`, for some datasets a distance. The score is computed from the
    latter as VLMEvalKit's own totals are (`hit_calculate`): the dataset is in the file's name.
    """
    cells = table.column(score)
    if score != "eval_score" or "eval_match" not in table.names:
        return cells
    for row, cell in enumerate(table.column("eval_match")):
        if cell in ("", None):
            continue
        # VLMEvalKit has the match of each reference answer: the best one counts, or their mean.
        matches = [float(match) for match in (ast.literal_eval(cell) if isinstance(cell, str) else cell)]
        if any(name in path.name for name in ("DocVQA", "InfoVQA")):
            # A match is a distance from 0 to 1: the nearest reference counts, and similarities below 0.5 count as 0.
            similarity = 1 - min(matches)  # ANLS, with its threshold
            cells[row] = similarity if similarity >= 0.5 else 0.0
        # Any reference answer that matches is enough.
        elif any(name in path.name for name in ("ChartQA", "OCRVQA")):
            cells[row] = max(matches)
        else:
            cells[row] = sum(matches) / len(matches)
    return cells


def _numbers(table: Table, column: str, cells: Sequence[Any]) -> FloatArray:
    """Return scores as numbers [N]; NaN where a cell is empty."""
    if table.decimal_comma:
        marks = {mark for mark in ",." if any(mark in cell for cell in cells if isinstance(cell, str))}
        if len(marks) > 1:
            raise ValueError(f"{column} has numbers with a decimal comma and with a point; write them alike")
    number_of: dict[Any, float | None] = {}  # most scores occur many times
    numbers = []
    for row, cell in enumerate(cells):
        try:
            number = number_of[cell] if cell in number_of else number_of.setdefault(cell, _number(table, cell))
        except TypeError:  # a list or an object
            number = None
        if number is None:
            raise ValueError(f"line {table.lines[row]}: {column} is {cell!r}, not a number")
        numbers.append(number)
    return np.array(numbers, dtype=np.float64)


def _number(table: Table, cell: Any) -> float | None:
    """Return a cell's number; NaN if it is empty, None if it is something else."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return math.nan
    if isinstance(cell, str):
        word = cell.strip().lower()
        if word in ("true", "false"):
            return float(word == "true")
        if table.decimal_comma:
            cell = cell.replace(",", ".")
    return to_float(cell)


def _column(stated: str, usual: Iterable[str], names: Sequence[str], option: str) -> str:
    """Return the stated column, or else the first of the usual ones that the table has."""
    candidates = [stated] if stated else list(usual)
    for name in candidates:
        if name in names:
            return name
    there_are = ", ".join(map(str, names))
    raise ValueError(f"no column {' or '.join(candidates)}; there are: {there_are}. Name one with --{option}")
