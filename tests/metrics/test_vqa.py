"""VQA accuracy equals the official program's, case by case; WUPS by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vlp_models.data.answers import build_answer_vocabulary, soft_scores
from vlp_models.errors import DataError
from vlp_models.metrics.vqa import AnsweredQuestion, prior_predictions, question_accuracy, score_vqa, score_wups, wups

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden_vqa.json").read_text())


def question(
    number: int, answers: list[str], kind: str = "what", answer_type: str = "other", text: str = "what is it?"
) -> AnsweredQuestion:
    return AnsweredQuestion(
        question_id=str(number),
        image_id=str(number // 2),
        text=text,
        question_type=kind,
        answer_type=answer_type,
        answers=answers,
    )


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: repr(case["prediction"]))
def test_accuracy_equals_the_official_one(case: dict) -> None:
    assert 100 * question_accuracy(case["prediction"], case["answers"]) == pytest.approx(case["official_accuracy"])


def test_overall_and_per_type_scores_equal_the_official_ones() -> None:
    cases = GOLDEN["cases"]
    questions = [question(i, c["answers"], c["question_type"], c["answer_type"]) for i, c in enumerate(cases)]
    scores = score_vqa({str(i): c["prediction"] for i, c in enumerate(cases)}, questions)
    values = {score.metric: round(score.value or 0, 2) for score in scores}
    expected = {"accuracy": GOLDEN["overall"]}
    expected |= {f"accuracy ({kind})": value for kind, value in GOLDEN["perAnswerType"].items()}
    expected |= {f"accuracy (question type {kind})": value for kind, value in GOLDEN["perQuestionType"].items()}
    assert values == expected


def test_accuracy_of_a_constant_answer_by_hand() -> None:
    questions = [
        question(0, ["red"] * 10),  # 1
        question(1, ["red"] * 2 + ["blue"] * 8),  # 0.6
        question(2, ["blue"] * 10),  # 0
        question(3, []),  # hidden: not scored
    ]
    (overall, *_) = score_vqa({str(i): "red" for i in range(4)}, questions)
    assert overall.value == pytest.approx(100 * 1.6 / 3)
    assert overall.n == 3
    assert overall.evidence is not None and list(overall.evidence.groups) == ["0", "0", "1"]
    with pytest.raises(DataError, match="1 of 3 questions have no prediction, such as 0"):
        score_vqa({"1": "red", "2": "red"}, questions)


def test_priors_come_from_train_only() -> None:
    train = [
        question(0, ["2"] * 10, "how many", text="how many cats?"),
        question(1, ["3"] * 9 + ["2"], "how many", text="how many dogs?"),
        question(2, ["yes"] * 10, "is", text="is it red?"),
        question(3, ["yes"] * 10, "is", text="is it blue?"),
    ]
    questions = [
        question(10, ["no"] * 10, "how many", text="How many dogs?"),
        question(11, ["no"] * 10, "how many", text="how many birds?"),
        question(12, ["no"] * 10, "why", text="why?"),
    ]
    priors = prior_predictions(train, questions)
    assert priors["majority answer"] == {"10": "yes", "11": "yes", "12": "yes"}
    assert priors["per question type"] == {"10": "2", "11": "2", "12": "yes"}
    assert priors["per question text"] == {"10": "3", "11": "2", "12": "yes"}
    assert prior_predictions([], questions) == {}


def test_single_right_answer_must_match_exactly() -> None:
    """DAQUAR has one answer per question: no annotators who may differ, and no normalization."""
    assert question_accuracy("book, tape_dispenser", ["book, tape_dispenser"]) == 1
    assert question_accuracy("book", ["book, tape_dispenser"]) == question_accuracy("Book", ["book"]) == 0
    vocabulary = build_answer_vocabulary([["waste_bin"], ["waste_bin"], ["The one, two"]], min_count=1)
    assert vocabulary == ["waste_bin", "The one, two"]
    assert soft_scores(["waste_bin"], {"waste_bin": 0}) == {0: 1.0}
    assert soft_scores(["red"], {"waste_bin": 0}) == {}


SIMILARITIES = {frozenset(("table", "desk")): 0.95, frozenset(("table", "chair")): 0.8}


def similarity(one: str, other: str) -> float:
    return SIMILARITIES.get(frozenset((one, other)), 0.2)


@pytest.mark.parametrize(
    ("prediction", "answer", "threshold", "expected"),
    [
        ("table", "table", 0.9, 1.0),
        ("desk", "table", 0.9, 0.95),
        ("chair", "table", 0.9, 0.08),  # below the threshold: a tenth
        ("chair", "table", 0.0, 0.8),
        ("table", "table, lamp", 0.9, 0.02),  # recall: the lamp matches with 0.1 x 0.2
        ("table, lamp", "table", 0.9, 0.02),  # precision: the same the other way
        ("lamp, desk", "table, lamp", 0.9, 0.95),  # order does not matter
        ("", "table", 0.0, 0.0),
    ],
)
def test_wups_of_a_question(prediction: str, answer: str, threshold: float, expected: float) -> None:
    assert wups(prediction, answer, threshold, similarity) == pytest.approx(expected)


def test_wups_is_the_mean_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.metrics.vqa.wordnet_similarity", lambda: similarity)
    strict, lenient = score_wups(["desk", "chair"], ["table", "table"], ["q1", "q2"], ["i", "i"])
    assert (strict.metric, lenient.metric) == ("WUPS@0.9", "WUPS@0.0")
    assert (strict.value, lenient.value) == (pytest.approx(51.5), pytest.approx(87.5))


def test_missing_wordnet_gives_no_wups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk.corpus", None)
    for score in score_wups(["desk"], ["table"], ["q"], ["i"]):
        assert score.value is None and score.note.startswith("not computed: needs nltk")
