"""The caption most similar to the others: against the definition, and against a slow loop over all pairs."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.consensus import ConsensusCaptions, most_similar


def slow_similarity(one: list[str], other: list[str]) -> float:
    """Return the CIDEr-D of one caption with another, with equal weights for all n-grams."""
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
def test_chosen_caption_has_the_highest_mean_similarity(group: list[str]) -> None:
    split = [caption.split() for caption in group]
    means = [sum(slow_similarity(one, other) for other in split) / len(split) for one in split]
    assert most_similar(split) == max(range(len(group)), key=lambda i: (round(means[i], 9), -i))


WORDS = ["a", "a", "a", "the", "dog", "cat", "boy", "runs", "sleeps", "on", "grass", "snow", "red", "big", "with"]


def corpus(seed: int) -> dict[str, list[str]]:
    """Return captions with repeated words, of one word, and equal ones."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(60)]
    return {f"i{n}": texts[n::12] for n in range(12)}


def slow_similarities(captions: dict[str, list[str]], group: list[str]) -> np.ndarray:
    """Score one pair at a time with the scorer of self-critical training, which is tested against the public one."""
    frequencies = DocumentFrequencies.count([[text.split() for text in own] for own in captions.values()])
    scorer = CiderD(frequencies, lambda reference: [reference.split()])
    return np.array([[scorer.score(other, [candidate.split()])[0] for other in group] for candidate in group])


@pytest.mark.parametrize("seed", range(6))
def test_choice_equals_comparing_all_pairs(seed: int) -> None:
    captions = corpus(seed)
    images = [f"i{n}" for n in random.Random(seed).sample(range(12), 4)]
    group = [text for image in images for text in captions[image]]
    slow, consensus = slow_similarities(captions, group), ConsensusCaptions(captions)
    counted = [counted for image in images for counted in consensus.counted(image)]
    assert np.allclose(consensus.similarity(counted), slow, atol=1e-9)
    others = slow - np.diag(np.diag(slow))
    assert consensus.choose(images) == group[int(np.round(others.mean(1), 9).argmax())]


def test_images_without_captions_give_an_empty_one() -> None:
    consensus = ConsensusCaptions({"one": ["a dog"], "none": []})
    assert consensus.choose([]) == consensus.choose(["none"]) == ""
    assert consensus.choose(["one", "none"]) == "a dog"
