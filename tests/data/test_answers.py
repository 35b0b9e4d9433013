from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlp_models.data.answers import build_answer_vocabulary, normalize_answer, soft_scores

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vqa.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "expected"), GOLDEN["normalisation_probe"])
def test_normalization_matches_the_official_code(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


def test_official_bugs_are_kept() -> None:
    assert normalize_answer("." * 40) == "." * 8  # only 32 periods go
    assert normalize_answer("it's somebody'd") == "it's somebodyd"
    assert normalize_answer("yalld've couldntve couldn'tve") == "yalld've couldntve couldn't've"
    assert normalize_answer("١,٢") == "١ ٢"  # a comma between digits that are not ASCII


def test_vocabulary_counts_multiple_choice_answers() -> None:
    questions = [
        ["The red"] * 6 + ["blue"] * 4,
        ["red"] * 10,
        ["blue", "red"] * 5,  # equals: the first given
        ["blue"] * 10,
        ["1,000"] * 10,
        ["green"] * 10,
        [],  # hidden
    ]
    assert build_answer_vocabulary(questions, 1) == ["blue", "red", "1000", "green"]
    assert build_answer_vocabulary(reversed(questions), 2) == ["blue", "red"]


def test_soft_scores_follow_the_leave_one_out_table() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3}
    answers = ["a"] + ["b"] * 2 + ["c"] * 3 + ["d"] * 4 + ["unknown"]
    assert soft_scores(answers, vocabulary) == {0: 0.3, 1: 0.6, 2: 0.9, 3: 1.0}
    assert soft_scores(["a"] * 10, vocabulary) == {0: 1.0}
    assert soft_scores(["A", "unknown"], vocabulary) == {}  # strings count as they stand
