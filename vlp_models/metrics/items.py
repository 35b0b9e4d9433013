"""Scores item by item, as a file: what a later comparison with another model needs, wherever it is made.

One Parquet file holds the metrics of one evaluated run; rows are (dataset, split, metric, item). N items, K statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.errors import DataError
from vlp_models.metrics.caption import bleu_percent
from vlp_models.metrics.classification import macro_f1_percent
from vlp_models.metrics.java import meteor_from_statistics
from vlp_models.metrics.score import Evidence, FloatArray, Score, Statistic, mean_percent

# What makes a metric of per-item sums, by the name that a file of items keeps. A task with another one says so
# (`TaskModel.statistics`).
STATISTICS: dict[str, Statistic] = {
    "mean": mean_percent,
    "macro F1": macro_f1_percent,
    "METEOR": meteor_from_statistics,
    **{f"BLEU-{n}": partial(bleu_percent, n=n) for n in range(1, 5)},
}
SCHEMA = pa.schema(
    [
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("metric", pa.string()),
        ("item", pa.string()),
        ("group", pa.string()),
        ("parts", pa.list_(pa.float64())),
        ("slices", pa.list_(pa.string())),
    ]
)
HEADER = b"vlp"


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemScores:
    """One metric on one dataset and split.

    test: hash of what was to be predicted (`stages.evaluate.test_hash`).
    note: how captions were searched for and what the scorer said of itself; where these differ, figures are not
        to be compared.
    slices: each item's, such as `question_type=how many`.
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

    def evidence(self, chosen: Sequence[int] | None = None) -> Evidence:
        """All items', or those of `chosen` rows."""
        rows = range(len(self.items)) if chosen is None else chosen
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
) -> ItemScores | None:
    """The storable form of a score; None where there is none: it has no value, or is not to be kept.

    Args:
        slices: by item id, or by what stands before its `#` (an image's captions share its slices).
        statistics: those that a metric may be made by.

    Raises:
        ValueError: the score is to be kept, and its statistic is none of `statistics`, or two items have one id.
    """
    evidence = score.evidence
    if evidence is None or not score.kept:
        return None
    statistic = _name(evidence.statistic, statistics)
    if statistic is None:
        raise ValueError(
            f"{score.metric}: its statistic is none of {', '.join(statistics)}, so no gate could compare by it; name "
            "it among the task's `statistics`, or set the score's `kept` to False"
        )
    items = [str(item) for item in evidence.items or evidence.groups]
    if len(set(items)) != len(evidence.groups):
        raise ValueError(f"{score.metric}: {len(evidence.groups)} items have {len(set(items))} different ids")
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
        slices=[slices.get(item, slices.get(item.rpartition("#")[0], ())) for item in items],
        statistics=statistics,
    )


def write_items(path: Path, scores: Iterable[ItemScores]) -> None:
    """The same scores give the same bytes."""
    several = list(scores)
    header = [
        {name: getattr(s, name) for name in ("dataset", "split", "metric", "statistic", "test", "note")}
        for s in several
    ]
    rows: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for s in several:
        rows["dataset"] += [s.dataset] * len(s.items)
        rows["split"] += [s.split] * len(s.items)
        rows["metric"] += [s.metric] * len(s.items)
        rows["item"] += s.items
        rows["group"] += s.groups
        rows["parts"] += s.parts_NK.tolist()
        rows["slices"] += [list(own) for own in s.slices]
    table = pa.table(rows, schema=SCHEMA.with_metadata({HEADER: json.dumps(header)}))
    pq.write_table(table, path, compression="zstd")


def read_items(path: Path, statistics: Mapping[str, Statistic] = STATISTICS) -> list[ItemScores]:
    """
    Args:
        statistics: of the task that the file is of.

    Raises:
        DataError: no such file, or not one of ours.
    """
    try:
        table = pq.read_table(path)
        header = json.loads((table.schema.metadata or {})[HEADER])
        columns = {name: table[name].to_pylist() for name in SCHEMA.names}
        rows: dict[tuple[str, str, str], list[int]] = {}
        for i, key in enumerate(zip(columns["dataset"], columns["split"], columns["metric"], strict=True)):
            rows.setdefault(key, []).append(i)
        found = []
        for entry in header:
            own = rows.get((entry["dataset"], entry["split"], entry["metric"]), [])
            if entry["statistic"] not in statistics:
                raise KeyError(f"unknown statistic {entry['statistic']}")
            found.append(
                ItemScores(
                    **entry,
                    items=[columns["item"][i] for i in own],
                    groups=[columns["group"][i] for i in own],
                    parts_NK=np.array([columns["parts"][i] for i in own], dtype=np.float64),
                    slices=[columns["slices"][i] for i in own],
                    statistics=statistics,
                )
            )
        return found
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a file of scores per item: {error}") from None


def _name(statistic: Statistic, statistics: Mapping[str, Statistic]) -> str | None:
    for name, known in statistics.items():
        if statistic is known:
            return name
        if (
            isinstance(statistic, partial)
            and isinstance(known, partial)
            and (statistic.func, statistic.keywords) == (known.func, known.keywords)
        ):
            return name
    return None
