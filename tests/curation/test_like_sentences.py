"""Sentences that are equal, or equal but for one word."""

from __future__ import annotations

import pytest

from vlp_models.curation.duplicates.leakage import compare_sentences

TEXTS = ["A dog runs over the green grass.", "Zwei Straßen kreuzen sich hier", "一只狗在草地上奔跑", "a red ball"]


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("a dog runs over the  GREEN grass", "equal"),
        ("zwei strassen kreuzen sich HIER!", "equal"),
        ("a dog runs over the brown grass", "one word apart"),
        ("a dog runs over the grass", "one word apart"),
        ("a big dog runs over the green grass", "one word apart"),
        ("a big dog runs over the brown grass", None),
        ("一只猫在草地上奔跑", "one word apart"),
        ("a blue ball", None),  # too short: without a word little is left
        ("A red ball.", "equal"),
        ("...", None),
    ],
)
def test_nearest_training_sentence(text: str, like: str | None) -> None:
    assert compare_sentences(["nothing like it at all", text], TEXTS) == [None, like]
