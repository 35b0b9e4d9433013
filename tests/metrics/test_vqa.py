"""VQA accuracy equals the official program's, case by case and by its definition; DAQUAR's accuracy and WUPS."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.data.answers import build_answer_vocabulary, soft_scores
from vlp_models.errors import DataError
from vlp_models.metrics.vqa import (
    AnsweredQuestion,
    prior_predictions,
    question_accuracy,
    score_vqa,
    score_wups,
    wordnet_similarity,
    wups,
)

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


def test_single_right_answer_is_a_set_of_words_without_normalization() -> None:
    """DAQUAR has one answer per question: no annotators who may differ."""
    assert question_accuracy("Book", ["book"]) == question_accuracy("book", ["book, tape_dispenser"]) == 0
    vocabulary = build_answer_vocabulary([["waste_bin"], ["waste_bin"], ["The one, two"]], min_count=1)
    assert vocabulary == ["waste_bin", "The one, two"]
    assert soft_scores(["waste_bin"], {"waste_bin": 0}) == {0: 1.0}
    assert soft_scores(["red"], {"waste_bin": 0}) == {}


def official_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Compute VQA's accuracy as its program does, annotator by annotator, for texts without contractions."""

    def normalize(text: str) -> str:
        deletes_all, result = re.search("[0-9],[0-9]", text), ""
        for character in text:
            if character in ';/[]"{}()=+\\_-><@`,?!':
                keeps_apart = not deletes_all and f"{character} " not in text and f" {character}" not in text
                result += " " if keeps_apart else ""
            else:
                result += character
        result = re.sub(r"[.](?![0-9])", "", result)
        numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
        digits = {"none": "0"} | {word: str(number) for number, word in enumerate(numbers)}
        words = [digits.get(word, word) for word in result.lower().split()]
        return " ".join(word for word in words if word not in ("a", "an", "the"))

    texts = [text.replace("\n", " ").replace("\t", " ").strip() for text in (prediction, *answers)]
    if len(set(texts[1:])) > 1:
        texts = [normalize(text) for text in texts]
    predicted, given_answers = texts[0], texts[1:]
    per_annotator = []
    for left_out in range(len(given_answers)):
        others = given_answers[:left_out] + given_answers[left_out + 1 :]
        per_annotator.append(min(1.0, others.count(predicted) / 3))
    return float(np.mean(per_annotator))


PIECES = ["yes", "Yes", "no", "two", "2", "none", "ten", "the", "A", "red", "3.5", ".5", "10,000", "1/2", "t-shirt", ""]
PIECES += [" ", "\n", "\t", ",", ", ", " .", "...", "?!", "'", '"', "(red)", "|||", "é", "٣,٤", "½", "a.b", "x" * 99]
odd_answers = st.lists(st.sampled_from(PIECES), max_size=5).map(" ".join) | st.sampled_from(PIECES)


@given(st.lists(odd_answers, min_size=1, max_size=4), st.data())
def test_accuracy_of_odd_answers_equals_the_definition(pool: list[str], data: st.DataObject) -> None:
    answers = data.draw(st.lists(st.sampled_from(pool), min_size=2, max_size=11))
    prediction = data.draw(st.sampled_from(pool) | odd_answers)
    assert question_accuracy(prediction, answers) == pytest.approx(official_accuracy(prediction, answers), abs=1e-12)


@given(st.lists(st.tuples(odd_answers, st.lists(odd_answers, min_size=2, max_size=4)), min_size=1, max_size=6))
def test_accuracy_of_resampled_questions_equals_that_of_the_questions(rows: list[tuple[str, list[str]]]) -> None:
    questions = [question(i, answers) for i, (_, answers) in enumerate(rows)]
    score = score_vqa({q.question_id: rows[i][0] for i, q in enumerate(questions)}, questions)[0]
    assert score.evidence is not None
    drawn = np.random.default_rng(0).integers(len(rows), size=2 * len(rows))
    expected = np.mean([official_accuracy(*rows[i]) for i in drawn])
    sums = score.evidence.parts_NK[drawn].sum(axis=0, keepdims=True)
    assert score.evidence.statistic(sums)[0] == pytest.approx(100 * expected, abs=1e-9)


words = st.lists(st.sampled_from(["book", "lamp", " book", "two_lamps", "", "Book", "é", "3"]), min_size=1, max_size=4)


@given(words, words)
def test_accuracy_of_one_right_answer_is_wups_without_similarity(predicted: list[str], right: list[str]) -> None:
    """The program of DAQUAR's authors computes the accuracy as WUPS in which only equal words are similar."""
    prediction, answer = ",".join(predicted), ", ".join(right)
    assert question_accuracy(prediction, [answer]) == wups(prediction, answer, 0.9, lambda word, other: 0.0)


SIMILARITIES = {frozenset(("table", "desk")): 0.95, frozenset(("table", "chair")): 0.8}


def similarity(one: str, other: str) -> float:
    return SIMILARITIES.get(frozenset((one, other)), 0.2 if one and other else 0.0)


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
        ("table,table", "table", 0.9, 1.0),
        ("", "table", 0.0, 0.0),
        ("table,", "table", 0.0, 0.0),  # the part after the comma matches nothing
        ("", "", 0.0, 1.0),
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


def test_similarity_is_that_of_nouns(monkeypatch: pytest.MonkeyPatch) -> None:
    def synsets(word: str, pos: str | None = None) -> list[SimpleNamespace]:
        if not word:
            return []
        noun, verb = (SimpleNamespace(wup_similarity=lambda other, value=value: value) for value in (0.3, 0.8))
        return [noun] if pos == "n" else [noun, verb]

    wordnet = SimpleNamespace(synsets=synsets, NOUN="n")
    monkeypatch.setitem(sys.modules, "nltk.corpus", SimpleNamespace(wordnet=wordnet))  # type: ignore[arg-type]
    similarity_of_words = wordnet_similarity()
    assert similarity_of_words is not None
    assert similarity_of_words("walk", "run") == 0.3 and similarity_of_words("walk", "") == 0
