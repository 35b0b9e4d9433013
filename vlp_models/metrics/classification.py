"""One label out of a few: accuracy, recall of each label, and macro F1.

Shape suffixes: N items, C labels, S resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from vlp_models.metrics.score import Evidence, FloatArray, Score, mean_score, not_computed


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """One item. group: the unit of resampling, its image. item: its id."""

    group: str
    item: str
    label: str
    prediction: str


def score_labels(rows: Sequence[Labelled], labels: Sequence[str]) -> list[Score]:
    """`accuracy`, `macro F1`, and for each label `recall (label)`, the share of its items that were given it.

    Args:
        labels: all there are; every row's label and prediction is one of them.
    """
    right = [float(row.label == row.prediction) for row in rows]
    groups, items = [row.group for row in rows], [row.item for row in rows]
    scores = [mean_score("accuracy", right, groups, items=items), _macro_f1(rows, labels)]
    for label in labels:
        of_label = [i for i, row in enumerate(rows) if row.label == label]
        own_groups, own_items = [groups[i] for i in of_label], [items[i] for i in of_label]
        scores.append(mean_score(f"recall ({label})", [right[i] for i in of_label], own_groups, items=own_items))
    return scores


def macro_f1_percent(sums_SK: FloatArray) -> FloatArray:
    """The mean over labels of F1 = 2 TP / (2 TP + FP + FN). Columns: a confusion matrix, rows are the true labels.

    Labels that neither occur nor are predicted in a resample do not count there.
    """
    size = isqrt(sums_SK.shape[1])
    confusion_SCC = sums_SK.reshape(-1, size, size)
    true_SC = np.diagonal(confusion_SCC, axis1=1, axis2=2)
    both_SC = confusion_SCC.sum(1) + confusion_SCC.sum(2)  # 2 TP + FP + FN
    f1_SC = np.divide(2 * true_SC, both_SC, out=np.zeros_like(both_SC), where=both_SC > 0)
    return 100 * f1_SC.sum(1) / np.maximum((both_SC > 0).sum(1), 1)


def commonest_label(labels: Iterable[str]) -> str:
    """The first by text among equals; empty without any."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label), default="")


def _macro_f1(rows: Sequence[Labelled], labels: Sequence[str]) -> Score:
    if not rows:
        return not_computed("macro F1", 0, "nothing to score")
    place = {label: number for number, label in enumerate(labels)}
    parts = np.zeros((len(rows), len(labels) ** 2))
    for i, row in enumerate(rows):
        parts[i, place[row.label] * len(labels) + place[row.prediction]] = 1
    evidence = Evidence(
        groups=[row.group for row in rows],
        parts_NK=parts,
        statistic=macro_f1_percent,
        items=[row.item for row in rows],
    )
    value = float(macro_f1_percent(parts.sum(0, keepdims=True))[0])
    return Score(metric="macro F1", value=value, n=len(rows), evidence=evidence)
