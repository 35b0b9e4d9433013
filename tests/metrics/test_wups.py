"""WUPS by hand, on a made-up likeness of words; without WordNet it is `not computed`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from vlp_models.metrics.vqa import score_wups, wups

NEAR = {frozenset(("table", "desk")): 0.95, frozenset(("table", "chair")): 0.8}


def similarity(one: str, other: str) -> float:
    return NEAR.get(frozenset((one, other)), 0.2)


@pytest.mark.parametrize(
    ("prediction", "answer", "threshold", "expected"),
    [
        ("table", "table", 0.9, 1.0),
        ("desk", "table", 0.9, 0.95),
        ("chair", "table", 0.9, 0.08),  # below the threshold: a tenth
        ("chair", "table", 0.0, 0.8),
        ("table", "table, lamp", 0.9, 0.02),  # the lamp is met by 0.1 x 0.2
        ("table, lamp", "table", 0.9, 0.02),  # and nobody asked for it here
        ("lamp, desk", "table, lamp", 0.9, 0.95),  # order does not matter
        ("", "table", 0.0, 0.0),
    ],
)
def test_a_question(prediction: str, answer: str, threshold: float, expected: float) -> None:
    assert wups(prediction, answer, threshold, similarity) == pytest.approx(expected)


def test_the_mean_in_percent() -> None:
    strict, lenient = score_wups(["desk", "chair"], ["table", "table"], ["q1", "q2"], ["i", "i"], similarity)
    assert (strict.metric, lenient.metric) == ("WUPS@0.9", "WUPS@0.0")
    assert (strict.value, lenient.value) == (pytest.approx(51.5), pytest.approx(87.5))


def test_without_wordnet_it_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_nltk(name: str, *args: Any) -> Any:
        if name.startswith("nltk"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without_nltk)
    for score in score_wups(["desk"], ["table"], ["q"], ["i"]):
        assert score.value is None and score.note.startswith("not computed: needs nltk")
