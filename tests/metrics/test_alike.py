"""The caption most like the others, against the definition written out."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from vlp_models.metrics.consensus import most_similar


def likeness(one: list[str], other: list[str]) -> float:
    """CIDEr-D of one caption against another, every n-gram weighed alike."""
    total = 0.0
    for n in range(1, 5):
        a, b = (Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (one, other))
        if a and b:
            dot = sum(min(a[gram], b[gram]) * b[gram] for gram in a)
            total += dot / math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))
    return total / 4 * math.exp(-((len(one) - len(other)) ** 2) / 72)


GROUPS = [
    ["a dog runs", "a brown dog runs on grass", "a brown dog runs on the grass", "two men sit at a table"],
    ["a man", "a man a man a man", "a man in a red shirt", "a man in a shirt", "a boy in a red shirt"],
    ["the same", "the same", "another"],
    ["alone"],
    ["", "a dog", "a dog"],
]


@pytest.mark.parametrize("group", GROUPS)
def test_it_has_the_highest_mean_likeness(group: list[str]) -> None:
    split = [caption.split() for caption in group]
    means = [sum(likeness(one, other) for other in split) / len(split) for one in split]
    assert most_similar(split) == max(range(len(group)), key=lambda i: (round(means[i], 9), -i))
