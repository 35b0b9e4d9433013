"""One label out of a few: accuracy, recall of each label, and macro F1.

Shape suffixes: N items, C labels, S resamples.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vlp_models.metrics.score import Evidence, Score, macro_f1_percent, mean_score, not_computed


@dataclass(frozen=True, kw_only=True)
class LabeledItem:
    """One item. group: the unit of resampling, its image. item: its id."""

    group: str
    item: str
    label: str
    prediction: str


def score_labels(rows: Sequence[LabeledItem], labels: Sequence[str]) -> list[Score]:
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


def most_common_label(labels: Iterable[str]) -> str:
    """The first by text among equals; empty without any."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label), default="")


def _macro_f1(rows: Sequence[LabeledItem], labels: Sequence[str]) -> Score:
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


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """A statement about one image or two, and what the model says of it.

    group: the sentence; in NLVR v1 all pictures of it and all six permutations of each, in NLVR2 its pairs of a set.
    item: the statement's id.
    """

    group: str
    label: bool
    prediction: bool
    item: str = ""


def score_nlvr(judgements: Sequence[Judgment], name: str = "accuracy") -> list[Score]:
    """accuracy: share of (statement, image) pairs judged right. consistency: share of groups judged right in every
    pair. Both as the scripts of the NLVR repository count them."""
    right = [judgement.label == judgement.prediction for judgement in judgements]
    groups = [judgement.group for judgement in judgements]
    whole: dict[str, bool] = {}
    for group, correct in zip(groups, right, strict=True):
        whole[group] = whole.get(group, True) and correct
    consistency = name.replace("accuracy", "consistency")
    return [
        mean_score(name, [float(correct) for correct in right], groups, items=[j.item for j in judgements]),
        mean_score(consistency, [float(correct) for correct in whole.values()], list(whole)),
    ]


def majority_label(labels: Iterable[bool]) -> bool:
    """The commoner label; true among equals."""
    values = list(labels)
    return 2 * sum(values) >= len(values)


def official_csv(rows: Iterable[tuple[str, bool]]) -> str:
    """Predictions as the official scripts read them: NLVR's `metrics_images.py` one image a line,
    `dev-12-0-3.png,true`; NLVR2's one identifier a line, `dev-850-0-0,true`. Upper and lower case are one to both."""
    return "".join(f"{image},{str(prediction).lower()}\n" for image, prediction in rows)


WORD = re.compile(r"\w+")
SMOOTHING = 1.0  # added to the count of every word and label


class HypothesisOnly:
    """Which words and pairs of words a hypothesis has, not how often; each says by itself how likely each label is."""

    def __init__(self, train: Iterable[tuple[str, str]]) -> None:
        """train: (hypothesis, label)."""
        self._labels: Counter[str] = Counter()
        self._having: dict[str, Counter[str]] = {}  # feature -> label -> hypotheses that have it
        for text, label in train:
            self._labels[label] += 1
            for feature in _features(text):
                self._having.setdefault(feature, Counter())[label] += 1
        self._features_of: Counter[str] = Counter()
        for counts in self._having.values():
            self._features_of.update(counts)

    def predict(self, text: str) -> str:
        """The likeliest label, among equals the first by text; features that train did not have say nothing. Empty
        without any training hypothesis."""
        return min(self._labels, key=lambda label: (-self._score(text, label), label), default="")

    def _score(self, text: str, label: str) -> float:
        total = self._features_of[label] + SMOOTHING * len(self._having)
        known = (self._having[feature] for feature in sorted(_features(text)) if feature in self._having)
        likelihood = sum(math.log((counts[label] + SMOOTHING) / total) for counts in known)
        return math.log(self._labels[label]) + likelihood


def _features(text: str) -> set[str]:
    words = WORD.findall(text.lower())
    return {*words, *(f"{one} {other}" for one, other in pairwise(words))}
