"""Scores: a metric's value, the statistics its interval is computed from, and the file that keeps them item by item.

A metric is a statistic (function) of sums over items, so it can be recomputed for resampled items. items.parquet keeps
the per-item statistics of an evaluated run, with rows (dataset, split, metric, item), so that gates can compare models
anywhere, later.

Shape suffixes: N items (images, questions, statements), K additive statistics per item, S resamples, C labels.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.io import is_line
from vlp_models.errors import DataError

FloatArray = NDArray[np.float64]
Statistic = Callable[[FloatArray], FloatArray]  # sums [S, K] -> values [S]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Per-item statistics that add up: the metric is `statistic` of their sum over the items.

    groups     the unit of resampling of each item (its image; NLVR: its sentence). Items of one group are not
               independent, so an interval that resamples items would be too narrow
    parts_NK   float64
    items      ids that pair the scores of two models; empty if every item is its own group
    samples    for each item the ids of the samples that it is about; empty if its own id is that of its sample
    """

    groups: Sequence[str]
    parts_NK: FloatArray
    statistic: Statistic
    items: Sequence[str] = ()
    samples: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """One metric's value in percent. None if it could not be computed; `note` then has the reason.

    kept: the evidence is kept item by item (`item_scores`), so that a gate can compare two models by it.
    """

    metric: str
    value: float | None
    n: int
    note: str = ""
    evidence: Evidence | None = None
    kept: bool = True  # plain-ok


def not_computed(metric: str, n: int, reason: str) -> Score:
    """Return a score without a value."""
    return Score(metric=metric, value=None, n=n, note=f"not computed: {reason}")


def mean_score(
    metric: str,
    values: Sequence[float] | FloatArray,
    groups: Sequence[str],
    note: str = "",
    *,
    items: Sequence[str] = (),
    samples: Sequence[Sequence[str]] = (),
    kept: bool = True,  # plain-ok
) -> Score:
    """Return the mean of per-item values between 0 and 1, in percent."""
    if len(values) != len(groups):
        raise ValueError(f"{metric}: {len(values)} values, {len(groups)} groups")
    if not len(values):
        return not_computed(metric, 0, "nothing to score")
    # (N, 2): the value and a one, so the sums over any items give their mean.
    parts = np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))])
    evidence = Evidence(groups=groups, parts_NK=parts, statistic=mean_percent, items=items, samples=samples)
    return Score(
        metric=metric,
        value=float(mean_percent(parts.sum(axis=0, keepdims=True))[0]),
        n=len(values),
        note=note,
        evidence=evidence,
        kept=kept,
    )


def mean_percent(sums_SK: FloatArray) -> FloatArray:
    """Return the mean in percent. Columns: sum of values, number of items."""
    return 100 * sums_SK[:, 0] / sums_SK[:, 1]


def bleu_percent(sums_SK: FloatArray, n: int) -> FloatArray:
    """Return corpus BLEU-n in percent.

    Columns: 4 matched n-grams, 4 candidate n-grams, candidate length, reference length.
    """
    # The constants are those of the public scorer, whose values these are to the last digits.
    precision = (sums_SK[:, :n] + 1e-15) / (sums_SK[:, 4 : 4 + n] + 1e-9)
    ratio = (sums_SK[:, 8] + 1e-15) / (sums_SK[:, 9] + 1e-9)
    return 100 * precision.prod(axis=1) ** (1 / n) * np.exp(np.minimum(0, 1 - 1 / ratio))


def macro_f1_percent(sums_SK: FloatArray) -> FloatArray:
    """Return the mean over labels of F1 = 2 TP / (2 TP + FP + FN). Columns: a confusion matrix, rows are true labels.

    Labels that neither occur nor are predicted in a resample do not count there.
    """
    size = isqrt(sums_SK.shape[1])
    # (S, C * C) -> (S, C, C): true positives are on the diagonal
    confusion_SCC = sums_SK.reshape(-1, size, size)
    true_SC = np.diagonal(confusion_SCC, axis1=1, axis2=2)
    both_SC = confusion_SCC.sum(1) + confusion_SCC.sum(2)  # 2 TP + FP + FN
    f1_SC = np.divide(2 * true_SC, both_SC, out=np.zeros_like(both_SC), where=both_SC > 0)
    return 100 * f1_SC.sum(1) / np.maximum((both_SC > 0).sum(1), 1)


def meteor_from_statistics(sums_SK: FloatArray) -> FloatArray:
    """Return METEOR 1.5 in percent (Denkowski and Lavie, 2014, English parameters), as the program computes it.

    Columns: sums of `Meteor.statistics`.
    """
    alpha, beta, gamma, delta = 0.85, 0.2, 0.6, 0.75
    by_kind = np.array([1.0, 0.6, 0.8, 0.6])  # exact, stem, synonym, paraphrase
    stages = sums_SK[:, 4:20].reshape(-1, 4, 4)  # per kind: content words (candidate, reference), then function words

    def weighted(content: FloatArray, function: FloatArray, length: FloatArray, functions: FloatArray) -> FloatArray:
        matched = (by_kind * (delta * content + (1 - delta) * function)).sum(axis=1)
        return _ratio(matched, delta * (length - functions) + (1 - delta) * functions)

    # Columns 0 to 3: length of candidate and of reference, then function words of candidate and of reference.
    precision = weighted(stages[:, :, 0], stages[:, :, 2], sums_SK[:, 0], sums_SK[:, 2])
    recall = weighted(stages[:, :, 1], stages[:, :, 3], sums_SK[:, 1], sums_SK[:, 3])
    mean = _ratio(precision * recall, alpha * precision + (1 - alpha) * recall)
    # Chunks per matched word: matched words that are adjacent on both sides form one chunk.
    fragmentation = _ratio(sums_SK[:, 20], (sums_SK[:, 21] + sums_SK[:, 22]) / 2)
    return 100 * mean * (1 - gamma * fragmentation**beta)


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


# Functions of per-item sums, by the name stored in items.parquet. A task may add its own (`TaskModel.statistics`).
STATISTICS: dict[str, Statistic] = {
    "mean": mean_percent,
    "macro F1": macro_f1_percent,
    "METEOR": meteor_from_statistics,
    **{f"BLEU-{n}": partial(bleu_percent, n=n) for n in range(1, 5)},
}
TEXTS = ("dataset", "split", "metric", "item", "group")
COLUMNS = (*TEXTS, "parts", "slices", "baselines")  # of items.parquet
HEADER = b"vlp"
EXTRA = "extra"  # key of scores.json's records whose metric is a plugin's
MAX_ROWS, MAX_VALUES, MAX_BYTES = 2_000_000, 50_000_000, 1 << 30  # of items.parquet


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemScores:
    """One metric on one dataset and split.

    test       fingerprint of the test set (`evaluation.test_set.hash_test_set`)
    note       the search and the scorer's note; scores with different notes are not comparable
    slices     of each item, such as `question_type=how many`
    baselines  parts_NK of each baseline on the same items
    """

    dataset: str
    split: str
    metric: str
    statistic: str
    test: str
    note: str
    items: Sequence[str]
    groups: Sequence[str]
    parts_NK: FloatArray
    slices: Sequence[Sequence[str]]
    statistics: Mapping[str, Statistic] = field(default_factory=lambda: STATISTICS)
    baselines: Mapping[str, FloatArray] = field(default_factory=dict)

    def evidence(self, numbers: Sequence[int] | None = None) -> Evidence:
        """Return the evidence of all items, or of those with these numbers."""
        rows = range(len(self.items)) if numbers is None else numbers
        return Evidence(
            groups=[self.groups[i] for i in rows],
            parts_NK=self.parts_NK[list(rows)],
            statistic=self.statistics[self.statistic],
            items=[self.items[i] for i in rows],
        )


def item_scores(
    score: Score,
    *,
    dataset: str,
    split: str,
    test: str,
    slices: Mapping[str, Sequence[str]],
    decoding: str = "",
    statistics: Mapping[str, Statistic] = STATISTICS,
    seen: Mapping[str, Sequence[str]] | None = None,
    baselines: Mapping[str, Score | float] | None = None,
) -> ItemScores | None:
    """Return the storable form of a score; None if it has no value or is not kept.

    Args:
        slices: by item id, or by the part before `#` (an image's captions share its slices).
        statistics: the known ones, by name.
        seen: further slices by sample id; an item of several samples has those of each.
        baselines: constants, and baselines without one of the items, are left out.

    Raises:
        ValueError: the score's statistic is not in `statistics`, or two items have the same id.
    """
    evidence = score.evidence
    if evidence is None or not score.kept:
        return None
    statistic = _name(evidence.statistic, statistics)
    if statistic is None:
        raise ValueError(
            f"{score.metric}: unknown statistic (known: {', '.join(statistics)}), so no gate could compare by it; add "
            "it to the task's `statistics`, or set the score's `kept` to False"
        )
    items = [str(item) for item in evidence.items or evidence.groups]
    # Two models are compared item by item, so an id must name one item.
    if len(set(items)) != len(evidence.groups):
        raise ValueError(f"{score.metric}: {len(evidence.groups)} items have {len(set(items))} different ids")

    # An image's captions, `<image>#<number>`, have the slices of the image.
    def slices_of_item(item: str, by_id: Mapping[str, Sequence[str]]) -> Sequence[str]:
        return by_id.get(item, by_id.get(item.rpartition("#")[0], ()))

    item_slices = [list(slices_of_item(item, slices)) for item in items]
    for i, ids in enumerate(evidence.samples or [[item] for item in items]):
        item_slices[i] += sorted({name for sample_id in ids for name in slices_of_item(sample_id, seen or {})})
    return ItemScores(
        dataset=dataset,
        split=split,
        metric=score.metric,
        statistic=statistic,
        test=test,
        note="; ".join(filter(None, (decoding, score.note))),
        items=items,
        groups=[str(group) for group in evidence.groups],
        parts_NK=evidence.parts_NK,
        slices=item_slices,
        statistics=statistics,
        baselines=_align(baselines or {}, items, evidence.parts_NK.shape[1]),
    )


def _align(baselines: Mapping[str, Score | float], items: Sequence[str], width: int) -> dict[str, FloatArray]:
    """Return the parts of each baseline that has all items, in their order."""
    aligned = {}
    for name, baseline in baselines.items():
        evidence = baseline.evidence if isinstance(baseline, Score) else None
        if evidence is None or evidence.parts_NK.shape[1] != width:
            continue
        row_of = {str(item): i for i, item in enumerate(evidence.items or evidence.groups)}
        if all(item in row_of for item in items):
            aligned[name] = evidence.parts_NK[[row_of[item] for item in items]]
    return aligned


def write_items(path: Path, scores: Iterable[ItemScores]) -> None:
    """Write items.parquet; equal scores give equal bytes."""
    import pyarrow as pa  # here: a model is loaded and served without Arrow
    import pyarrow.parquet as pq

    scores = list(scores)
    # What is the same for all items of a score is in the schema's metadata; the rows refer to it by the first three.
    header = []
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for s in scores:
        entry = {name: getattr(s, name) for name in ("dataset", "split", "metric", "statistic", "test", "note")}
        header.append({**entry, "baselines": list(s.baselines)})
        rows["dataset"] += [s.dataset] * len(s.items)
        rows["split"] += [s.split] * len(s.items)
        rows["metric"] += [s.metric] * len(s.items)
        rows["item"] += s.items
        rows["group"] += s.groups
        rows["parts"] += s.parts_NK.tolist()
        rows["slices"] += [list(item_slices) for item_slices in s.slices]
        # (N, K) of each of B baselines -> (N, B * K)
        rows["baselines"] += np.hstack([np.zeros((len(s.items), 0)), *s.baselines.values()]).tolist()
    lists = {"parts": pa.list_(pa.float64()), "slices": pa.list_(pa.string()), "baselines": pa.list_(pa.float64())}
    schema = pa.schema([(name, lists.get(name, pa.string())) for name in COLUMNS])
    table = pa.table(rows, schema=schema.with_metadata({HEADER: json.dumps(header)}))
    pq.write_table(table, path, compression="zstd")


def read_items(
    file: Path | bytes, statistics: Mapping[str, Statistic] = STATISTICS, *, name: str = ""
) -> list[ItemScores]:
    """Read items.parquet.

    Args:
        file: its path or its content.
        statistics: those of the file's task.
        name: of the file, in errors; default: its path.

    Raises:
        DataError: the file is missing, too large, or was not written by `write_items`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pa.BufferReader(file) if isinstance(file, bytes) else file
        # As dictionaries: a text that is repeated a million times is in memory once.
        parquet = pq.ParquetFile(source, read_dictionary=list(TEXTS))
        # Before anything is read: a small compressed file can expand to many gigabytes.
        _check_size(parquet.metadata)
        table = parquet.read()
        header = json.loads((table.schema.metadata or {})[HEADER])
        columns = {column: _texts(table[column]) for column in TEXTS}
        slices = _lists(table["slices"], _texts)
        parts = _number_lists(table["parts"])
        # Files that were written earlier have no baselines.
        baselines = _number_lists(table["baselines"]) if "baselines" in table.column_names else None
        rows: dict[tuple[str, str, str], list[int]] = {}  # (dataset, split, metric) -> numbers of its rows
        for i, key in enumerate(zip(columns["dataset"], columns["split"], columns["metric"], strict=True)):
            rows.setdefault(key, []).append(i)
        scores = []
        for entry in header:
            test_key = (entry["dataset"], entry["split"], entry["metric"])
            if not all(map(is_line, test_key)):
                raise ValueError("a dataset, split or metric is not a text of one line")
            if test_key not in rows:
                raise ValueError(f"no items of {entry['metric']} on {entry['dataset']} {entry['split']}")
            if entry["statistic"] not in statistics:
                raise KeyError(f"unknown statistic {entry['statistic']}")
            numbers = rows[test_key]
            names = entry.pop("baselines", [])
            if not isinstance(names, list) or not all(map(is_line, names)):
                raise ValueError("the name of a baseline is not a text of one line")
            parts_NK = parts(numbers)
            # (N, B * K) -> (N, B, K), and below (N, K) of each baseline
            sides = baselines(numbers) if names and baselines else np.empty((len(numbers), 0))
            sides_NBK = sides.reshape(len(numbers), len(names), parts_NK.shape[1])
            scores.append(
                ItemScores(
                    **entry,
                    baselines={name: sides_NBK[:, i] for i, name in enumerate(names)},
                    items=[columns["item"][i] for i in numbers],
                    groups=[columns["group"][i] for i in numbers],
                    parts_NK=parts_NK,
                    slices=[slices[i] for i in numbers],
                    statistics=statistics,
                )
            )
        return scores
    except (OSError, pa.ArrowException, LookupError, TypeError, ValueError, RecursionError) as error:
        name = name or (str(file) if isinstance(file, Path) else "the content")
        raise DataError(f"{name}: not an items.parquet written by `write_items`: {error}") from None


def _check_size(metadata: Any) -> None:
    """Check the size that a parquet file has in memory, which compression hides."""
    size = values = 0
    for group in [metadata.row_group(i) for i in range(metadata.num_row_groups)]:
        size += group.total_byte_size
        values += sum(group.column(i).num_values for i in range(group.num_columns))
    if metadata.num_rows > MAX_ROWS or values > MAX_VALUES or size > MAX_BYTES:
        raise ValueError(
            f"{metadata.num_rows:,} rows with {values:,} values in {size:,} bytes; at most {MAX_ROWS:,} rows with "
            f"{MAX_VALUES:,} values in {MAX_BYTES:,} bytes are read"
        )


def _texts(column: Any) -> list[str]:
    """Return the texts of a column or an array; equal ones are the same object."""
    texts: list[str] = []
    for chunk in getattr(column, "chunks", [column]):
        # A column that was read as a dictionary is encoded already.
        encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
        values = encoded.dictionary.to_pylist()
        texts += [values[i] for i in encoded.indices.to_pylist()]
    return texts


def _lists(column: Any, convert: Callable[[Any], Any]) -> list[Any]:
    """Return the lists of a column, cut from the converted values of each chunk."""
    lists: list[Any] = []
    for chunk in column.chunks:
        # One conversion per chunk, not one per list.
        values = convert(chunk.flatten())
        ends = itertools.accumulate(chunk.value_lengths().to_pylist(), initial=0)
        lists += [values[start:end] for start, end in itertools.pairwise(ends)]
    return lists


def _number_lists(column: Any) -> Callable[[Sequence[int]], FloatArray]:
    """Return a function of row numbers that returns their lists of numbers, all of one length, as a matrix."""
    # All lists one after another. `to_numpy` would import pandas.
    values = np.concatenate([np.from_dlpack(chunk.flatten()) for chunk in column.chunks])
    lengths = np.array([length for chunk in column.chunks for length in chunk.value_lengths().to_pylist()], np.intp)
    starts = np.cumsum(lengths) - lengths

    def rows(numbers: Sequence[int]) -> FloatArray:
        size = lengths[numbers[0]]
        if (lengths[numbers] != size).any():
            raise ValueError("items of one metric with lists of different lengths")
        matrix: FloatArray = values[starts[numbers][:, None] + np.arange(size)].astype(np.float64)
        return matrix

    return rows


def _name(statistic: Statistic, statistics: Mapping[str, Statistic]) -> str | None:
    for name, candidate in statistics.items():
        if statistic is candidate:
            return name
        if not isinstance(statistic, partial) or not isinstance(candidate, partial):
            continue
        # `partial` compares by identity: two are the same statistic if they call the same function in the same way.
        if (statistic.func, statistic.keywords) == (candidate.func, candidate.keywords):
            return name
    return None
