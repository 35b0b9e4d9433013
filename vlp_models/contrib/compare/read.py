"""Read scores per item from result files of several programs.

| program | files |
|---|---|
| this project | items.parquet, or the folder of an evaluated run |
| lmms-eval, lm-evaluation-harness | `*_samples_*.jsonl` (`--log_samples`) |
| VLMEvalKit | xlsx, tsv, csv or json with `index` and `hit` or `score` |
| Inspect | logs: `.eval` or `.json` |
| any | csv, tsv, xlsx, json or jsonl with `item`, `score` and, if there are, `cluster`, `model`, `seed`, `metric` |

What names an item, what is a score and what forms the clusters is in each run's `notes`, with the items that have no
score. A metric's value is the mean of its scores per item, whatever total its own program computes from them.
Files are data from outside: no pickle, and archives that unpack to more than `MAX_BYTES` are refused.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import HEAD, convert_command, explain_not_text
from vlp_models.contrib.compare.inspect_logs import read_inspect, read_inspect_archive
from vlp_models.contrib.compare.scored import (
    CLUSTER_NAMES,
    MEDIA,
    SCORE_NAMES,
    Columns,
    Row,
    Run,
    Scored,
    explain_clusters,
    explain_unscored,
    first_named,
    id_texts,
    score_items,
    texts,
)
from vlp_models.contrib.compare.tables import read_csv, read_rows, read_xlsx
from vlp_models.errors import DataError, MissingToolError, VLPError
from vlp_models.metrics.score import read_items

# Of the samples that lmms-eval and lm-evaluation-harness write; every other number is a metric.
NOT_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "input", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash", "schema_version", "idx", "token_counts", "input_media"),
}
Values = list[tuple[int, float]]  # numbers of samples in the file, and their scores
LOG_LIKELIHOOD = "log-likelihood"  # what lm-evaluation-harness logs per item under the name perplexity


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
    collecting = gc.isenabled()
    try:
        # Name the encoding as the reason, rather than a parser's error about odd characters.
        if path.suffix.lower() in TEXTS:
            with path.open("rb") as file:
                if reason := explain_not_text(file.read(HEAD), str(path)):
                    raise DataError(f"{path}: {reason}")
        # It would go through millions of new rows again and again.
        gc.disable()
        runs = reader(path, columns)
    except VLPError:
        raise
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; save it as UTF-8: {convert_command(str(path))}") from None
    except Exception as error:  # bytes from outside: what a damaged file raises depends on where it is damaged
        reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: not readable: {reason}") from None
    finally:
        if collecting:
            gc.enable()
    if model and len({run.model for run in runs}) > 1:
        raise DataError(f"{path}: has {len(runs)} runs of several models, so it cannot be called {model}")
    # The stated name first, then the file's own, then the file's name.
    named = [Run(**{**vars(run), "model": model or run.model or path.stem}) for run in runs]
    if not any(run.metrics for run in named):
        why = [note for run in named for note in run.notes if "not compared" in note or "left out" in note]
        raise DataError("; ".join([f"{path}: no scores per item", *why]))
    return named


# ---- This project ---------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, columns: Columns) -> list[Run]:
    try:
        item_scores = read_items(path)
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    splits = {(scores.dataset, scores.split) for scores in item_scores}
    metrics = {}
    # One dataset and split need no prefix.
    for scores in item_scores:
        name = scores.metric if len(splits) == 1 else f"{scores.dataset} {scores.split} {scores.metric}"
        metrics[name] = Scored(
            items=scores.items,
            clusters=scores.groups,
            parts_NK=scores.parts_NK,
            statistic=scores.evidence().statistic,
            # The test set's hash and the note must be equal in both files.
            test=f"{scores.test} {scores.note}",
        )
    model, seed = path.parent.name, ""
    record = path.with_name("scores.json")
    if record.is_file():
        first: dict[str, Any] = next(iter(json.loads(record.read_text(encoding="utf-8"))), {})
        model, seed = str(first.get("variant", model)), str(first.get("seed", ""))
    return [Run(model=model, seed=seed, source=path, metrics=metrics, notes=["clusters: the file's groups"])]


def _read_json(path: Path, columns: Columns) -> list[Run]:
    # `utf-8-sig` drops the byte order mark that some programs put at the start.
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if isinstance(rows, dict) and isinstance(rows.get("samples"), list):
        return read_inspect(path, rows, rows["samples"], columns)
    if isinstance(rows, dict) and isinstance(rows.get("results"), dict):
        raise ValueError("totals of tasks, without scores per item; give the samples file (`--log_samples`)")
    if isinstance(rows, dict) and rows and all(isinstance(column, dict) for column in rows.values()):
        keys = next(iter(rows.values()))  # column -> row -> value, as pandas writes it
        rows = [{name: column.get(key) for name, column in rows.items()} for key in keys]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("neither a list of rows nor an Inspect log with its samples")
    return read_rows(path, rows, columns)


# ---- Samples of lmms-eval and lm-evaluation-harness ------------------------------------------------------------------


def _read_jsonl(path: Path, columns: Columns) -> list[Run]:
    numbers, rows = [], []
    parse = json.JSONDecoder().raw_decode  # json.loads takes twice the time for short lines
    with path.open(encoding="utf-8-sig") as lines:
        for number, padded in enumerate(lines, 1):
            if line := padded.strip():
                try:
                    row, end = parse(line)
                    if end < len(line):
                        json.loads(line)  # raises: something follows the object
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number}: not an object")
                numbers.append(number)
                rows.append(row)
    # Only the samples of lmms-eval and lm-evaluation-harness have this key.
    if not rows or "doc_id" not in rows[0]:
        return read_rows(path, rows, columns, numbers)
    return _read_samples(path, rows, columns)


def _read_samples(path: Path, rows: list[dict[str, Any]], columns: Columns) -> list[Run]:
    """Return the run of a file of samples; a metric's name has its filter, as in lm-evaluation-harness's results."""
    item = columns.item or "doc_id"
    cells = functools.cache(functools.partial(_sample_cells, rows))
    items = id_texts(cells(item))
    values: dict[str, Values] = {}  # metric -> its scores
    skipped: dict[str, list[int]] = {}
    metrics_of: dict[tuple[str, ...], list[str]] = {}  # keys of a sample, mostly those of all others -> metrics
    dictionaries: dict[str, list[Any]] = {}  # metric -> those of its entries that are dictionaries with the score
    for number, row in enumerate(rows):
        names = row.get("metrics")
        if columns.score:
            names = [columns.score]
        elif not isinstance(names, list):
            # Without a list of its metrics, every key that is not bookkeeping may be one.
            keys = tuple(row)
            if keys not in metrics_of:
                metrics_of[keys] = [name for name in keys if name not in NOT_METRICS]
            names = metrics_of[keys]
        # A filter is a way to extract the answer: its scores are a metric of their own.
        suffix = f",{row['filter']}" if row.get("filter") not in (None, "", "none") else ""
        for name in names:
            metric, value = f"{name}{suffix}", _number_of(row.get(name))
            if value is None:
                skipped.setdefault(metric, []).append(number)
            else:
                values.setdefault(metric, []).append((number, value))
                if isinstance(row[name], dict):
                    dictionaries.setdefault(metric, []).append(row[name])
    if columns.score and not values:
        raise ValueError(f"no number in {columns.score}; there are: {', '.join(rows[0])}")
    # Metrics that never have a number are named with an example, others with the items that lack one.
    never = sorted(set(skipped) - set(values))
    unscored = [explain_unscored(name, [items[i] for i in skipped[name]]) for name in skipped if name in values]
    same = _drop_repeated(values, dictionaries)
    # `perplexity` of lm-evaluation-harness is a log-likelihood per item: it gets that name.
    for name in [name for name in values if name.partition(",")[0] == "perplexity"]:
        if all(value <= 0 for _, value in values[name]):  # which no perplexity is
            values[name.replace("perplexity", LOG_LIKELIHOOD)] = values.pop(name)
    contents = _sample_contents(cells)
    fields = {*itertools.chain.from_iterable(rows), *itertools.chain.from_iterable(map(_document, rows))}
    cluster = columns.cluster or first_named([name for name in (*CLUSTER_NAMES, MEDIA) if name in fields], cells)
    clusters = id_texts(cells(cluster)) if cluster else []
    metrics = {}
    for name, numbered in values.items():
        numbers, scores = zip(*numbered, strict=True)
        metrics[name] = score_items(
            [items[i] for i in numbers],
            scores,
            [clusters[i] for i in numbers] if cluster else [],
            item=item,
            cluster=cluster,
            row_at=[rows[i] for i in numbers].__getitem__,
            contents={kind: [column[i] for i in numbers] for kind, column in contents.items()},
        )
    notes = [f"items: {item}", explain_clusters(cluster), *same]
    if never:
        first = {name: rows[0].get(name.partition(",")[0]) for name in never}
        examples = "; ".join(f"{name} (such as {json.dumps(first[name])[:60]})" for name in never)
        notes.append(f"without one number per item, so not compared: {examples}")
    return [Run(model="", seed="", source=path, metrics=metrics, notes=[*notes, *unscored])]


def _sample_cells(rows: Sequence[Row], name: str) -> list[Any]:
    """Return a key of each sample, or else of its document, which lm-evaluation-harness logs; None without either.

    `input_media` is the first `doc_id` with the same images, since paths differ between machines, and None unless all
    samples have it.
    """
    if name != MEDIA:
        return [row[name] if name in row else _document(row).get(name) for row in rows]
    if not all(isinstance(row.get(MEDIA), list) and row[MEDIA] for row in rows):
        return [None] * len(rows)
    first: dict[str, Any] = {}  # images -> the first document that shows them
    return [first.setdefault(json.dumps(row[MEDIA]), row.get("doc_id")) for row in rows]


def _document(row: Row) -> Row:
    document = row.get("doc")
    return document if isinstance(document, dict) else {}


def _sample_contents(cells: Callable[[str], Iterable[Any]]) -> dict[str, list[str]]:
    """Return what identifies the documents.

    lmms-eval writes the same `doc_hash` for all documents, that of no document: then it is the target and the input.
    """
    hashes = texts(cells("doc_hash"))
    contents = {"target": texts(cells("target")), "input": texts(cells("input"))}
    return {"doc_hash": hashes, **contents} if len(hashes) == 1 or len(set(hashes)) > 1 else contents


def _drop_repeated(values: dict[str, Values], dictionaries: Mapping[str, list[Any]]) -> list[str]:
    """Remove metrics that log the dictionaries of another one, and return a note of them.

    POPE's accuracy, precision, recall and F1 are totals of the same answers: their scores per item are equal.
    """
    first: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    for name, entries in dictionaries.items():
        if len(entries) == len(values[name]):
            # Metrics that log equal dictionaries for every item are equal: keep the first.
            original = first.setdefault(json.dumps(entries, sort_keys=True), name)
            if original != name:
                repeated.setdefault(original, []).append(name)
                del values[name]
    return [f"the scores per item of {', '.join(names)} are those of {name}" for name, names in repeated.items()]


def _number_of(value: Any) -> float | None:
    """Return a metric's number: itself, or the only score in the dictionary that some tasks log instead."""
    if isinstance(value, dict):
        numbers = [_number_of(value.get(name)) for name in SCORE_NAMES]
        numbers = [number for number in numbers if number is not None]
        return numbers[0] if len(numbers) == 1 else None
    try:
        # `math.isfinite` raises OverflowError for an integer that no float can hold.
        return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


TEXTS = (".jsonl", ".json", ".csv", ".tsv")
READERS: dict[str, Callable[[Path, Columns], list[Run]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".eval": read_inspect_archive,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".xlsx": read_xlsx,
}
