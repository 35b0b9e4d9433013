"""Read scores per item from result files of several programs.

| program | files |
|---|---|
| this project | items.parquet, or the folder of an evaluated run |
| lmms-eval, lm-evaluation-harness | `*_samples_*.jsonl` (`--log_samples`) |
| VLMEvalKit | xlsx, tsv, csv or json with `index` and `hit` or `score` |
| Inspect | logs: `.eval` or `.json` |
| any | csv, tsv, xlsx, json or jsonl with `item`, `score` and, if there are, `cluster`, `model`, `seed`, `metric` |

What names an item, what is a score and what forms the clusters is in each run's `notes`.
Files are data from outside: no pickle, and archives that unpack to more than `MAX_BYTES` are refused.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from vlp_models.common.io import HEAD, convert_command, explain_not_text, read_zip_member
from vlp_models.errors import DataError, MissingToolError, VLPError
from vlp_models.metrics.score import FloatArray, Statistic, read_items

MAX_BYTES = 4 << 30
MAX_CELLS = 50_000_000  # of a spreadsheet's range, which is read as a whole
SCORE_NAMES = ("score", "hit", "eval_score", "correct", "accuracy", "acc", "exact_match", "match")
ITEM_NAMES = ("item", "index", "doc_id", "question_id", "id")
CLUSTER_NAMES = ("cluster", "group", "image_id", "video_id", "image_path", "video")
# Of the samples that lmms-eval and lm-evaluation-harness write; every other number is a metric.
NOT_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "input", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash", "schema_version", "idx", "token_counts", "input_media"),
}
MEDIA = "input_media"  # of a sample of lmms-eval: the image files that it shows, if the documents name files
INSPECT_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer
INSPECT_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # in any case

ZSTANDARD = 93  # a zip member's compression

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The items of one metric of one run.

    parts_NK    statistics that add up over items
    documents   item -> hash of its content, if the file has one: equal ids with other contents are not the same item
    derived     clusters are named after one of their items, which depends on the items in the file and on their order
    """

    items: Sequence[str]
    clusters: Sequence[str]
    parts_NK: FloatArray
    statistic: Statistic
    documents: Mapping[str, str] = field(default_factory=dict)
    derived: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One evaluated training of a model.

    seed   "" if unknown
    notes  what was taken for items, scores and clusters
    """

    model: str
    seed: str
    source: Path
    metrics: Mapping[str, Scored]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns (or keys) that the user states; "": by the names above."""

    item: str = ""
    score: str = ""
    cluster: str = ""


def plain_mean(sums_SK: FloatArray) -> FloatArray:
    """Return the mean. Columns: sum of values, number of items."""
    return sums_SK[:, 0] / sums_SK[:, 1]


def read_runs(path: Path, model: str = "", columns: Columns = Columns()) -> list[Run]:
    """Return the runs in a file: one, unless its columns `model` and `seed` name several.

    Args:
        path: a result file, or the folder of a run that this project evaluated.
        model: its name; default: the file's own, or the file's name.

    Raises:
        DataError: it does not exist, is damaged, or has no scores; the message names what it has.
        MissingToolError: reading it needs a package that is not installed.
    """
    if path.is_dir():
        if not (path / "items.parquet").is_file():
            raise DataError(f"{path}: a folder without items.parquet; name the result file itself")
        path = path / "items.parquet"
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of file; known: {', '.join(READERS)}")
    try:
        if path.suffix.lower() in TEXTS:
            with path.open("rb") as file:
                if reason := explain_not_text(file.read(HEAD), str(path)):
                    raise DataError(f"{path}: {reason}")
        runs = reader(path, columns)
    except VLPError:
        raise
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; save it as UTF-8: {convert_command(str(path))}") from None
    except Exception as error:  # bytes from outside: what a damaged file raises depends on where it is damaged
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: not readable: {what}") from None
    if model and len({run.model for run in runs}) > 1:
        raise DataError(f"{path}: has {len(runs)} runs of several models, so it cannot be called {model}")
    named = [Run(**{**vars(run), "model": model or run.model or path.stem}) for run in runs]
    if not any(run.metrics for run in named):
        raise DataError(f"{path}: no scores per item")
    return named


# ---- This project ---------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, columns: Columns) -> list[Run]:
    try:
        found = read_items(path)
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    places = {(scores.dataset, scores.split) for scores in found}
    metrics = {}
    for scores in found:
        name = scores.metric if len(places) == 1 else f"{scores.dataset} {scores.split} {scores.metric}"
        metrics[name] = Scored(
            items=scores.items,
            clusters=scores.groups,
            parts_NK=scores.parts_NK,
            statistic=scores.evidence().statistic,
            documents={"": f"{scores.test} {scores.note}"},
        )
    model, seed = path.parent.name, ""
    record = path.with_name("scores.json")
    if record.is_file():
        first: dict[str, Any] = next(iter(json.loads(record.read_text(encoding="utf-8"))), {})
        model, seed = str(first.get("variant", model)), str(first.get("seed", ""))
    return [Run(model=model, seed=seed, source=path, metrics=metrics, notes=["clusters: the file's groups"])]


# ---- Samples of lmms-eval and lm-evaluation-harness ------------------------------------------------------------------


def _read_jsonl(path: Path, columns: Columns) -> list[Run]:
    numbers, rows = [], []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number}: not an object")
                numbers.append(number)
                rows.append(row)
    if columns.score or not rows or "doc_id" not in rows[0]:
        return _read_rows(path, rows, columns, numbers)
    return _read_samples(path, rows, columns)


def _read_samples(path: Path, rows: list[dict[str, Any]], columns: Columns) -> list[Run]:
    filters = {str(row.get("filter", "")) for row in rows}
    flatten = _flattener(rows)
    values: dict[str, list[tuple[Row, float]]] = {}
    skipped: dict[str, list[str]] = {}
    for row in rows:
        listed = (
            row.get("metrics") if isinstance(row.get("metrics"), list) else [k for k in row if k not in NOT_METRICS]
        )
        suffix = f",{row.get('filter', '')}" if len(filters) > 1 else ""
        for name in listed or []:
            value = _number_of(row.get(name))
            if value is None:
                skipped.setdefault(f"{name}{suffix}", []).append(_text(row.get(columns.item or "doc_id")))
            else:
                values.setdefault(f"{name}{suffix}", []).append((row, value))
    item = columns.item or "doc_id"
    metrics, cluster = {}, ""
    for name, own in values.items():
        plain = [flatten(row) for row, _ in own]
        cluster = columns.cluster or _first((*CLUSTER_NAMES, MEDIA), plain)
        metrics[name] = _scored(plain, [value for _, value in own], item, cluster)
    notes = [f"items: {item}", _explain_clusters(cluster)]
    if never := sorted(set(skipped) - set(values)):
        notes.append(f"without one number per item, so not compared: {', '.join(never)}")
    notes += [_explain_unscored(name, items) for name, items in skipped.items() if name in values]
    return [Run(model="", seed="", source=path, metrics=metrics, notes=notes)]


def _number_of(value: Any) -> float | None:
    """Return a metric's number: itself, or the only score in the dictionary that some tasks log instead."""
    if isinstance(value, dict):
        found = [number for name in SCORE_NAMES if (number := _number_of(value.get(name))) is not None]
        return found[0] if len(found) == 1 else None
    try:
        return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _flattener(rows: Sequence[Row]) -> Callable[[Row], dict[str, Any]]:
    """Return a function that gives a sample of a file the form of a table's row.

    The document's own fields (lm-evaluation-harness logs it) are next to the sample's keys. `input_media` becomes the
    first `doc_id` with the same images, since paths differ between machines, and is left out unless all samples have
    it. lmms-eval 0.7 writes the same `doc_hash` for all documents; the hash of such rows is their target.
    """
    all_show = all(isinstance(row.get(MEDIA), list) and row[MEDIA] for row in rows)
    first: dict[str, str] = {}  # images -> the first document that shows them
    for row in rows if all_show else ():
        first.setdefault(json.dumps(row[MEDIA]), _text(row.get("doc_id")))
    same_hash = len(rows) > 1 and len({row.get("doc_hash") for row in rows}) == 1

    def flatten(row: Row) -> dict[str, Any]:
        document = row.get("doc")
        flat = {**document, **row} if isinstance(document, dict) else dict(row)
        flat.pop(MEDIA, None)
        if all_show:
            flat[MEDIA] = first[json.dumps(row[MEDIA])]
        if same_hash:
            flat["doc_hash"] = _text(row.get("target"))
        return flat

    return flatten


# ---- Inspect --------------------------------------------------------------------------------------------------------


def _read_inspect_archive(path: Path, columns: Columns) -> list[Run]:
    with zipfile.ZipFile(path) as archive:
        _check_size(path, archive)
        members = {member.filename: member for member in archive.infolist()}
        header = json.loads(_read_member(path, archive, members["header.json"])) if "header.json" in members else {}
        names = [name for name in members if name.startswith("samples/") and name.endswith(".json")]
        samples = [json.loads(_read_member(path, archive, members[name])) for name in sorted(names)]
    return _read_inspect(path, header, samples, columns)


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's content; Inspect compresses with Zstandard, which Python's zipfile reads from 3.14 on."""
    if member.compress_type != ZSTANDARD:
        return read_zip_member(archive, member)
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name, extra = struct.unpack("<26xHH", file.read(30))
        file.seek(name + extra, 1)
        content = file.read(member.compress_size)
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        unpacked = bytes(stream.read(member.file_size + 1))
    if len(unpacked) != member.file_size:
        raise ValueError(f"{member.filename} does not have the {member.file_size:,} bytes that it declares")
    return unpacked


def _read_inspect(path: Path, header: Row, samples: Sequence[Row], columns: Columns) -> list[Run]:
    """Return the log's run; the epochs of a sample are averaged.

    Raises:
        ValueError: there are scorers, but none whose values are all numbers.
    """
    values: dict[str, dict[str, list[float]]] = {}
    others: dict[str, str] = {}  # scorer that is not compared -> its first value that is not a number
    rows: dict[str, Row] = {}
    for sample in samples:
        item = str(sample["id"])
        rows[item] = {**(sample.get("metadata") or {}), "id": item}
        for scorer, score in (sample.get("scores") or {}).items():
            found = score.get("value") if isinstance(score, dict) else None
            for name, value in (found if isinstance(found, dict) else {"": found}).items():
                metric, number = f"{scorer}/{name}" if name else scorer, _inspect_number(value)
                if number is None:
                    others.setdefault(metric, f"sample {item}: {metric} is {str(value)[:50]!r}, not a number")
                elif not math.isnan(number):
                    values.setdefault(metric, {}).setdefault(item, []).append(number)
    values = {name: own for name, own in values.items() if name not in others}
    if others and not values:
        raise ValueError("; ".join(others.values()))
    metrics, cluster = {}, ""
    for name, own in values.items():
        chosen = [rows[item] for item in own]
        cluster = columns.cluster or _first(CLUSTER_NAMES, chosen)
        metrics[name] = _scored(chosen, [float(np.mean(epochs)) for epochs in own.values()], "id", cluster)
    evaluated = header.get("eval") or {}
    notes = ["items: id", _explain_clusters(cluster)]
    if any(len(epochs) > 1 for own in values.values() for epochs in own.values()):
        notes.append("epochs of a sample are averaged")
    notes += [f"not compared: {message}" for message in others.values()]
    for name, own in values.items():
        if unscored := [item for item in rows if item not in own]:
            notes.append(_explain_unscored(name, unscored))
    return [Run(model=str(evaluated.get("model", "")), seed="", source=path, metrics=metrics, notes=notes)]


def _inspect_number(value: Any) -> float | None:
    """Return a score's number as Inspect's `value_to_float` does; NaN: not scored, None: not a number."""
    if isinstance(value, str):
        value = INSPECT_VALUES.get(value, INSPECT_WORDS.get(value.lower(), value))
    return math.nan if value is None else _to_float(value)


# ---- Tables ---------------------------------------------------------------------------------------------------------


def _read_json(path: Path, columns: Columns) -> list[Run]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))
    if isinstance(found, dict) and isinstance(found.get("samples"), list):
        return _read_inspect(path, found, found["samples"], columns)
    if isinstance(found, dict) and found and all(isinstance(column, dict) for column in found.values()):
        keys = next(iter(found.values()))  # column -> row -> value, as pandas writes it
        found = [{name: column.get(key) for name, column in found.items()} for key in keys]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("neither a list of rows nor an Inspect log with its samples")
    return _read_rows(path, found, columns)


def _read_csv(path: Path, columns: Columns) -> list[Run]:
    limit = csv.field_size_limit(64 << 20)  # an image may stand in a column; the limit is that of the whole process
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            numbers, rows = _as_rows((lines.line_num, line) for line in lines)
    finally:
        csv.field_size_limit(limit)
    return _read_rows(path, rows, columns, numbers)


def _read_xlsx(path: Path, columns: Columns) -> list[Run]:
    try:
        from python_calamine import CalamineWorkbook
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs python-calamine: pip install python-calamine") from None
    with zipfile.ZipFile(path) as archive:
        _check_size(path, archive)
        _check_cells(archive)
    try:
        sheet = CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0)
        lines = sheet.to_python()
    except Exception as error:  # the library has an error class for each kind of damage
        raise ValueError(str(error)) from None
    numbers, rows = _as_rows(
        enumerate(lines, 1 + (sheet.start or (0, 0))[0])
    )  # lines: from the first that is not empty
    return _read_rows(path, rows, columns, numbers)


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


def _read_rows(path: Path, rows: Sequence[Row], columns: Columns, numbers: Sequence[int] = ()) -> list[Run]:
    """Return the runs of a table's rows, by their `model` and `seed`. numbers: of their lines; default: 1, 2, ..."""
    if not rows:
        raise ValueError("empty")
    known = list(rows[0])
    item = _column(columns.item, ITEM_NAMES, known, "item")
    score = _column(columns.score, SCORE_NAMES, known, "score")
    cluster = columns.cluster or _first(CLUSTER_NAMES, rows)
    if cluster and cluster not in known:
        raise ValueError(f"no column {cluster}; there are: {', '.join(known)}")
    runs: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        key = (_text(row.get("model")), _text(row.get("seed")))
        runs.setdefault(key, {}).setdefault(_text(row.get("metric")) or score, []).append(row)
    number_of = {id(row): number for row, number in zip(rows, numbers or range(1, len(rows) + 1), strict=True)}
    found = []
    for (model, seed), metrics in runs.items():
        scored = {
            name: _scored(own, [_parse(row.get(score), score, number_of[id(row)]) for row in own], item, cluster)
            for name, own in metrics.items()
        }
        notes = [f"items: {item}", f"scores: {score}", _explain_clusters(cluster)]
        found.append(Run(model=model, seed=seed, source=path, metrics=scored, notes=notes))
    return found


def _column(stated: str, usual: Iterable[str], known: Sequence[str], option: str) -> str:
    found = stated if stated in known else "" if stated else next((name for name in usual if name in known), "")
    if not found:
        missing = f"no column {stated}" if stated else f"no column {' or '.join(usual)}"
        raise ValueError(f"{missing}; there are: {', '.join(map(str, known))}. Name one with --{option}")
    return found


def _parse(value: Any, name: str, line: int) -> float:
    words = {"true": 1.0, "false": 0.0}
    number = _to_float(words.get(value.strip().lower(), value) if isinstance(value, str) else value)
    if number is None or math.isnan(number):
        raise ValueError(f"line {line}: {name} is {value!r}, not a number")
    return number


def _to_float(value: Any) -> float | None:
    """Return a number or a text as a number, which may be NaN; None if it is infinite or something else."""
    if isinstance(value, str) and "_" in value:  # float() would read 1_0 as 10
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isinf(number) else number


def _text(value: Any) -> str:
    """Return a cell's text; whole numbers look the same from a spreadsheet (7.0) and from text (7)."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value).strip()


# ---- All ------------------------------------------------------------------------------------------------------------


def _scored(rows: Sequence[Row], values: Sequence[float], item: str, cluster: str) -> Scored:
    lacking = next((row for row in rows if not _text(row.get(item))), None)
    if lacking is not None:
        raise ValueError(f"a row without {item}: {json.dumps(lacking, default=str)[:200]}")
    items = [_text(row[item]) for row in rows]
    if len(set(items)) < len(items):
        seen: set[str] = set()
        repeated = next(name for name in items if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{item} {repeated} occurs more than once; name a column that distinguishes rows with --item")
    blank = [name for name, row in zip(items, rows, strict=True) if cluster and not _text(row.get(cluster))]
    if blank:
        raise ValueError(
            f"{cluster} is empty for {len(blank):,} items ({', '.join(blank[:5])}), so it cannot form the clusters; "
            f"fill it, or name another column with --cluster ({item}: each item by itself)"
        )
    return Scored(
        items=items,
        clusters=[_text(row[cluster]) for row in rows] if cluster else items,
        parts_NK=np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))]),
        statistic=plain_mean,
        documents={name: str(row["doc_hash"]) for name, row in zip(items, rows, strict=True) if row.get("doc_hash")},
        derived=cluster == MEDIA,
    )


def _first(names: Iterable[str], rows: Sequence[Row]) -> str:
    return next((name for name in names if any(_text(row.get(name)) for row in rows)), "")


def _explain_unscored(name: str, items: Sequence[str]) -> str:
    return f"{len(items):,} items have no number for {name} and are left out: {', '.join(items[:5])}" + (
        ", ..." if len(items) > 5 else ""
    )


def _explain_clusters(cluster: str) -> str:
    return f"clusters: {cluster}" if cluster else "clusters: none known, so every item counts by itself (--cluster)"


def _check_size(path: Path, archive: zipfile.ZipFile) -> None:
    size = sum(member.file_size for member in archive.infolist())
    if size > MAX_BYTES:
        raise ValueError(f"unpacks to {size:,} bytes, more than {MAX_BYTES:,}")


TEXTS = (".jsonl", ".json", ".csv", ".tsv")
READERS: dict[str, Callable[[Path, Columns], list[Run]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".eval": _read_inspect_archive,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".xlsx": _read_xlsx,
}
