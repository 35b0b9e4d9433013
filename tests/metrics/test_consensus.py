"""The caption a group agrees on: likeness is the house's CIDEr-D, the choice is that of a slow loop over all pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.consensus import ConsensusCaptions

WORDS = [
    "a",
    "a",
    "a",
    "the",
    "dog",
    "cat",
    "boy",
    "runs",
    "sleeps",
    "on",
    "grass",
    "snow",
    "red",
    "big",
    "with",
    "ball",
]


def corpus(seed: int) -> dict[str, list[str]]:
    """Repeated words, captions of one word, equal captions."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(60)]
    return {f"i{n}": texts[n::12] for n in range(12)}


def slow_likeness(captions: dict[str, list[str]], group: list[str]) -> np.ndarray:
    """By the scorer of self-critical training, which is held to the public one: a pair at a time."""
    frequencies = DocumentFrequencies.count([[text.split() for text in several] for several in captions.values()])
    scorer = CiderD(frequencies, lambda reference: [reference.split()])
    return np.array([[scorer.score(other, [candidate.split()])[0] for other in group] for candidate in group])


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_comparing_all_pairs(seed: int) -> None:
    captions = corpus(seed)
    images = [f"i{n}" for n in random.Random(seed).sample(range(12), 4)]
    group = [text for image in images for text in captions[image]]
    slow, consensus = slow_likeness(captions, group), ConsensusCaptions(captions)
    counted = [counted for image in images for counted in consensus.counted(image)]
    assert np.allclose(consensus.likeness(counted), slow, atol=1e-9)
    others = slow - np.diag(np.diag(slow))
    assert consensus.choose(images) == group[int(np.round(others.mean(1), 9).argmax())]


def test_without_captions_there_is_nothing_to_agree_on() -> None:
    consensus = ConsensusCaptions({"one": ["a dog"], "none": []})
    assert consensus.choose([]) == consensus.choose(["none"]) == ""
    assert consensus.choose(["one", "none"]) == "a dog"
