"""Classification scores: accuracy, recall per label and macro F1; NLVR's accuracy and consistency; VCR's three
accuracies (Zellers et al. 2019, section 3); and a baseline that reads the text alone.

`HypothesisOnly` guesses entailment from a hypothesis' words by naive Bayes trained on train: A. Poliak et al.,
"Hypothesis Only Baselines in Natural Language Inference" (2018); S. Gururangan et al., "Annotation Artifacts in Natural
Language Inference Data" (2018): annotators asked for a contradiction write `sleeping` and `nobody`. A model uses the
image only if it beats this baseline, not just chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vlp_models.common.unicode_words import split_words
from vlp_models.metrics.score import Evidence, Score, macro_f1_percent, mean_score, not_computed


@dataclass(frozen=True, kw_only=True)
class LabeledItem:
    """One item. group: its image, the unit of resampling. item: its id."""

    group: str
    item: str
    label: str
    prediction: str


def score_labels(rows: Sequence[LabeledItem], labels: Sequence[str]) -> list[Score]:
    """Return `accuracy`, `macro F1` and, for each label, `recall (label)`.

    Args:
        labels: all labels; every row's label and prediction is one of them.
    """
    right = [float(row.label == row.prediction) for row in rows]
    groups, items = [row.group for row in rows], [row.item for row in rows]
    scores = [mean_score("accuracy", right, groups, items=items), _macro_f1(rows, labels)]
    for label in labels:
        numbers = [i for i, row in enumerate(rows) if row.label == label]
        values, label_groups = [right[i] for i in numbers], [groups[i] for i in numbers]
        scores.append(mean_score(f"recall ({label})", values, label_groups, items=[items[i] for i in numbers]))
    return scores


def most_common_label(labels: Iterable[str]) -> str:
    """Return the most common label, the first by text among equals; empty without labels."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label), default="")


def _macro_f1(rows: Sequence[LabeledItem], labels: Sequence[str]) -> Score:
    if not rows:
        return not_computed("macro F1", 0, "nothing to score")
    index = {label: number for number, label in enumerate(labels)}
    # (N, C * C): of each item, the one cell of the confusion matrix that it is in
    parts = np.zeros((len(rows), len(labels) ** 2))
    for i, row in enumerate(rows):
        parts[i, index[row.label] * len(labels) + index[row.prediction]] = 1
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
    """A statement about one image (NLVR) or two (NLVR2), and the model's prediction.

    group: the sentence. In NLVR it covers all images of the sentence and the six permutations of each, in NLVR2 its
    image pairs of one set. item: the statement's id.
    """

    group: str
    label: bool
    prediction: bool
    item: str = ""


def score_nlvr(judgements: Sequence[Judgment]) -> list[Score]:
    """Return accuracy, the share of right (statement, image) pairs, and consistency, the share of groups in which every
    pair is right; both as the scripts of the NLVR repository compute them."""
    right = [judgement.label == judgement.prediction for judgement in judgements]
    groups = [judgement.group for judgement in judgements]
    group_right: dict[str, bool] = {}
    members: dict[str, list[str]] = {}
    for judgement, correct in zip(judgements, right, strict=True):
        group_right[judgement.group] = group_right.get(judgement.group, True) and correct
        members.setdefault(judgement.group, []).append(judgement.item)
    accuracy = mean_score("accuracy", list(map(float, right)), groups, items=[j.item for j in judgements])
    # An item of consistency is a group, and is about all of the group's statements.
    values, samples = list(map(float, group_right.values())), list(members.values())
    consistency = mean_score("consistency", values, list(group_right), samples=samples)
    return [accuracy, consistency]


def majority_label(labels: Iterable[bool]) -> bool:
    """Return the more common label; true if equal."""
    values = list(labels)
    return 2 * sum(values) >= len(values)


def format_nlvr_csv(rows: Iterable[tuple[str, bool]]) -> str:
    """Format predictions for the official scripts: one `dev-12-0-3.png,true` per line for NLVR's `metrics_images.py`,
    one `dev-850-0-0,true` for NLVR2's. Both ignore case."""
    return "".join(f"{image},{str(prediction).lower()}\n" for image, prediction in rows)


SMOOTHING = 1.0  # added to the count of every word and label


class HypothesisOnly:
    """Naive Bayes on the words and word pairs of a hypothesis, without their counts."""

    def __init__(self, train: Iterable[tuple[str, str]]) -> None:
        """train: (hypothesis, label)."""
        self._labels: Counter[str] = Counter()
        self._having: dict[str, Counter[str]] = {}  # feature -> label -> hypotheses that have it
        for text, label in train:
            self._labels[label] += 1
            for feature in _features(text):
                self._having.setdefault(feature, Counter())[label] += 1
        # Label -> how many features its hypotheses have together: the denominator of a feature's probability.
        self._features_of: Counter[str] = Counter()
        for counts in self._having.values():
            self._features_of.update(counts)

    def predict(self, text: str) -> str:
        """Return the most likely label, the first by text among equals; empty without training data.

        Features that train did not have are ignored.
        """
        return min(self._labels, key=lambda label: (-self._score(text, label), label), default="")

    def _score(self, text: str, label: str) -> float:
        # Smoothed, so that a feature that a label never had does not make the label impossible.
        total = self._features_of[label] + SMOOTHING * len(self._having)
        # Sorted, because a sum of floats depends on its order.
        known_features = [feature for feature in sorted(_features(text)) if feature in self._having]
        likelihood = sum(math.log((self._having[feature][label] + SMOOTHING) / total) for feature in known_features)
        return math.log(self._labels[label]) + likelihood


def _features(text: str) -> set[str]:
    words = split_words(text.lower())
    return {*words, *(f"{word} {next_word}" for word, next_word in pairwise(words))}


VCR_CHANCE = {"Q->A": 25.0, "QA->R": 25.0, "Q->AR": 6.25}


@dataclass(frozen=True, kw_only=True)
class VCRResult:
    """The result of one question. group: its image. item: its id. None: the label is hidden, or no choice was made."""

    group: str
    answer_right: bool | None
    rationale_right: bool | None  # chosen given the right answer
    item: str = ""


def score_vcr(results: Sequence[VCRResult]) -> list[Score]:
    """Return Q->A, QA->R and Q->AR in percent, each over the questions where it is known."""
    columns: dict[str, list[bool | None]] = {"Q->A": [], "QA->R": [], "Q->AR": []}
    for result in results:
        # A question counts as right in both only if both are known.
        is_judged = result.answer_right is not None and result.rationale_right is not None
        columns["Q->A"].append(result.answer_right)
        columns["QA->R"].append(result.rationale_right)
        columns["Q->AR"].append(result.answer_right and result.rationale_right if is_judged else None)
    scores = []
    for metric, column in columns.items():
        judged = [(result, float(right)) for result, right in zip(results, column, strict=True) if right is not None]
        if judged:
            values, groups = [right for _, right in judged], [result.group for result, _ in judged]
            scores.append(mean_score(metric, values, groups, items=[result.item for result, _ in judged]))
        else:
            scores.append(not_computed(metric, 0, "labels are hidden, or the run was not trained on it"))
    return scores


def format_vcr_csv(rows: Sequence[tuple[str, Sequence[float], Sequence[Sequence[float]]]]) -> str:
    """Format the leaderboard's file: annot_id, four answer probabilities, four rationale probabilities per answer.

    Args:
        rows: annot_id, [4], [4][4] (given answer, rationale).
    """
    header = ["annot_id", *(f"answer_{i}" for i in range(4))]
    header += [f"rationale_conditioned_on_a{answer_number}_{i}" for answer_number in range(4) for i in range(4)]
    lines = [",".join(header)]
    for annot_id, answer, rationales in rows:
        probabilities = [*answer, *(p for block in rationales for p in block)]
        lines.append(",".join([annot_id, *(f"{p:.6f}" for p in probabilities)]))
    return "\n".join(lines) + "\n"
