"""WUPS (Malinowski and Fritz 2014, equation 12): DAQUAR's accuracy that forgives near misses, by Wu and Palmer's
similarity.

An answer is a set of words. The similarity of two words is the highest over their synsets in WordNet; below the
threshold it counts a tenth. WordNet comes with nltk, and its data by a download of its own, so neither is a dependency
of ours: without them the figure is `not computed`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from vlp_models.metrics.score import Score, mean_score, not_computed

THRESHOLDS = (0.9, 0.0)
BELOW = 0.1  # the factor of a similarity below the threshold
WAY_OUT = "needs nltk and its WordNet: pip install nltk && python -m nltk.downloader wordnet"

Similarity = Callable[[str, str], float]  # of two words, 0 to 1


def score_wups(
    predictions: Sequence[str],
    answers: Sequence[str],
    items: Sequence[str],
    images: Sequence[str],
    similarity: Similarity | None = None,
) -> list[Score]:
    """`WUPS@0.9` and `WUPS@0.0`.

    Args:
        predictions, answers: of each question; several things have commas between them.
        similarity: of two words; None: WordNet's.
    """
    similarity = similarity or wordnet_similarity()
    names = [f"WUPS@{threshold}" for threshold in THRESHOLDS]
    if similarity is None:
        return [not_computed(name, len(answers), WAY_OUT) for name in names]
    scores = []
    for name, threshold in zip(names, THRESHOLDS, strict=True):
        values = [wups(p, a, threshold, similarity) for p, a in zip(predictions, answers, strict=True)]
        scores.append(mean_score(name, values, images, items=items, kept=False))
    return scores


def wups(prediction: str, answer: str, threshold: float, similarity: Similarity) -> float:
    """Of one question, 0 to 1: the lesser of how well the answer's words are met, and how well the prediction's are."""
    said, right = _words(prediction), _words(answer)
    if not said or not right:
        return 0.0

    def near(one: str, other: str) -> float:
        value = 1.0 if one == other else similarity(one, other)
        return value if value >= threshold else BELOW * value

    met = math.prod(max(near(word, other) for other in said) for word in right)
    meant = math.prod(max(near(word, other) for other in right) for word in said)
    return min(met, meant)


def wordnet_similarity() -> Similarity | None:
    """Wu and Palmer's, the highest over two words' synsets; None where nltk or its WordNet is not there."""
    try:
        wordnet = importlib.import_module("nltk.corpus").wordnet
        wordnet.synsets("table")
    except (ImportError, LookupError):
        return None

    @lru_cache(maxsize=100_000)
    def similarity(one: str, other: str) -> float:
        pairs = ((a, b) for a in wordnet.synsets(one) for b in wordnet.synsets(other))
        return max((a.wup_similarity(b) or 0.0 for a, b in pairs), default=0.0)

    return similarity


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]
