"""How far the sentences alone go: entailment guessed from a hypothesis' words, by naive Bayes learnt from train.

A. Poliak et al., "Hypothesis Only Baselines in Natural Language Inference" (2018); S. Gururangan et al., "Annotation
Artifacts in Natural Language Inference Data" (2018): annotators asked for a contradiction write `sleeping` and
`nobody`. A model that sees is one that beats this, not one that beats chance.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

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
