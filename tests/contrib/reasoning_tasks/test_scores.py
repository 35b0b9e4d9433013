"""Accuracy, recall and macro F1 as scikit-learn's; items.parquet; NLVR; VCR; the hypothesis-only baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.contrib.reasoning_tasks.scores import (
    HypothesisOnly,
    Judgment,
    LabeledItem,
    VCRResult,
    format_nlvr_csv,
    format_vcr_csv,
    majority_label,
    most_common_label,
    score_labels,
    score_nlvr,
    score_vcr,
)
from vlp_models.metrics.bootstrap import interval, sum_by_group
from vlp_models.metrics.score import Evidence, FloatArray, Score, item_scores, macro_f1_percent, read_items, write_items

pytestmark = pytest.mark.usefixtures("few_items_suffice")

LABELS = ("a", "b", "c")
PAIRS = ["aa", "aa", "ab", "bb", "ba", "cc"]  # label, prediction


def rows() -> list[LabeledItem]:
    return [LabeledItem(group=f"g{i // 2}", item=f"i{i}", label=p[0], prediction=p[1]) for i, p in enumerate(PAIRS)]


def test_scores_equal_those_by_hand() -> None:
    found = {score.metric: score for score in score_labels(rows(), LABELS)}
    assert found["accuracy"].value == pytest.approx(100 * 4 / 6)
    assert found["recall (a)"].value == pytest.approx(100 * 2 / 3) and found["recall (a)"].n == 3
    assert found["recall (c)"].value == 100
    # F1: a 2*2/(4+1+1), b 2*1/(2+1+1), c 1
    assert found["macro F1"].value == pytest.approx(100 * (4 / 6 + 2 / 4 + 1) / 3)
    ends = interval(found["macro F1"].evidence, resamples=200, seed=1)
    assert ends is not None and ends[0] <= found["macro F1"].value <= ends[1]


def of_groups(score: Score, groups: Sequence[str]) -> float:
    """Return the score of these groups, which may repeat, as a bootstrap computes it."""
    assert score.evidence is not None
    names, sums_GK = sum_by_group(score.evidence.groups, score.evidence.parts_NK)
    drawn = [names.index(group) for group in groups]
    return float(score.evidence.statistic(sums_GK[drawn].sum(axis=0, keepdims=True))[0])


pairs_of_labels = st.tuples(st.sampled_from(LABELS), st.sampled_from(LABELS))


@settings(max_examples=30)
@given(st.lists(st.lists(pairs_of_labels, min_size=1, max_size=3), min_size=1, max_size=6), st.data())
def test_scores_of_any_resample_equal_those_of_scikit_learn(images: list[list[tuple[str, str]]], data: Any) -> None:
    sklearn: Any = pytest.importorskip("sklearn.metrics")
    items = [
        LabeledItem(group=str(image), item=f"{image} {n}", label=label, prediction=prediction)
        for image, pairs in enumerate(images)
        for n, (label, prediction) in enumerate(pairs)
    ]
    scores = {score.metric: score for score in score_labels(items, LABELS)}
    drawn = data.draw(st.lists(st.sampled_from(range(len(images))), min_size=1, max_size=8))
    for numbers in (range(len(images)), drawn):
        labels, predictions = zip(*(pair for number in numbers for pair in images[number]), strict=True)
        accuracy = sklearn.accuracy_score(labels, predictions)
        macro_f1 = sklearn.f1_score(labels, predictions, average="macro", zero_division=0)
        groups = [str(number) for number in numbers]
        assert of_groups(scores["accuracy"], groups) == pytest.approx(100 * accuracy, abs=1e-9)
        assert of_groups(scores["macro F1"], groups) == pytest.approx(100 * macro_f1, abs=1e-9)
    labels, predictions = zip(*(pair for pairs in images for pair in pairs), strict=True)
    for label in set(labels):
        recall = sklearn.recall_score(labels, predictions, labels=[label], average="macro", zero_division=0)
        assert scores[f"recall ({label})"].value == pytest.approx(100 * recall, abs=1e-9)


def test_absent_label_does_not_count() -> None:
    both = np.array([[1.0, 0, 0, 0, 1, 0, 0, 0, 0]])
    assert macro_f1_percent(both)[0] == 100
    only = [LabeledItem(group="g", item="i", label="a", prediction="a")]
    missing = {score.metric: score for score in score_labels(only, LABELS)}["recall (b)"]
    assert missing.value is None and missing.note.startswith("not computed")
    assert score_labels([], LABELS)[1].value is None
    assert most_common_label(["b", "a", "b", "a"]) == "a" and most_common_label([]) == ""


def test_stored_items_give_the_same_scores(tmp_path: Path) -> None:
    place = {"dataset": "d", "split": "test", "test": "t"}
    scores = score_labels(rows(), LABELS)
    kept = [found for score in scores if (found := item_scores(score, **place, slices={}))]
    write_items(tmp_path / "items.parquet", kept)
    back = {items.metric: items for items in read_items(tmp_path / "items.parquet")}
    assert set(back) == {"accuracy", "macro F1", "recall (a)", "recall (b)", "recall (c)"}
    for score in scores:
        evidence = back[score.metric].evidence()
        assert evidence.statistic(evidence.parts_NK.sum(0, keepdims=True))[0] == pytest.approx(score.value)


def test_unknown_statistic_is_an_error_unless_the_score_is_not_kept() -> None:
    def own(sums_SK: FloatArray) -> FloatArray:
        return sums_SK[:, 0]

    evidence = Evidence(groups=["a", "b"], parts_NK=np.ones((2, 1)), statistic=own)
    score = Score(metric="odd", value=2.0, n=2, evidence=evidence)
    with pytest.raises(ValueError, match="odd: unknown statistic \\(known: mean"):
        item_scores(score, dataset="d", split="s", test="t", slices={})
    unkept = Score(metric="odd", value=2.0, n=2, evidence=evidence, kept=False)
    assert item_scores(unkept, dataset="d", split="s", test="t", slices={}) is None
    stored = item_scores(score, dataset="d", split="s", test="t", slices={}, statistics={"own": own})
    assert stored is not None and stored.statistic == "own"
    twice = Evidence(groups=["a", "a"], parts_NK=np.ones((2, 1)), statistic=own)
    with pytest.raises(ValueError, match="2 items have 1 different ids"):
        item_scores(
            Score(metric="odd", value=2.0, n=2, evidence=twice),
            dataset="d",
            split="s",
            test="t",
            slices={},
            statistics={"own": own},
        )


def test_vcr_needs_both_right_and_skips_unknown_ones() -> None:
    verdicts = [(True, True), (True, False), (False, True), (True, None), (None, None)]
    scores = {
        s.metric: s
        for s in score_vcr(
            [VCRResult(group=str(i), answer_right=a, rationale_right=r) for i, (a, r) in enumerate(verdicts)]
        )
    }
    assert (scores["Q->A"].value, scores["Q->A"].n) == (pytest.approx(75), 4)
    assert (scores["QA->R"].value, scores["QA->R"].n) == (pytest.approx(200 / 3), 3)
    assert (scores["Q->AR"].value, scores["Q->AR"].n) == (pytest.approx(100 / 3), 3)
    hidden = score_vcr([VCRResult(group="a", answer_right=None, rationale_right=None)])
    assert all(s.value is None and "hidden" in s.note for s in hidden)


@given(st.lists(st.tuples(st.integers(0, 3), *[st.integers(0, 3)] * 4), min_size=1, max_size=9), st.data())
def test_vcr_scores_of_any_resample_equal_the_hits(questions: list[tuple[int, int, int, int, int]], data: Any) -> None:
    """Q->AR counts a question if the choices of both subtasks are right."""
    table = np.array(questions)  # image, answer, its label, rationale, its label
    answer_hits, rationale_hits = table[:, 1] == table[:, 2], table[:, 3] == table[:, 4]
    expected = {"Q->A": answer_hits, "QA->R": rationale_hits, "Q->AR": answer_hits & rationale_hits}
    drawn = data.draw(st.lists(st.sampled_from(sorted({str(image) for image in table[:, 0]})), min_size=1, max_size=8))
    results = [
        VCRResult(group=str(image), item=str(n), answer_right=bool(answer), rationale_right=bool(rationale))
        for n, (image, answer, rationale) in enumerate(zip(table[:, 0], answer_hits, rationale_hits, strict=True))
    ]
    for score in score_vcr(results):
        assert score.value == pytest.approx(100 * expected[score.metric].mean(), abs=1e-9)
        hits = np.concatenate([expected[score.metric][table[:, 0] == int(image)] for image in drawn])
        assert of_groups(score, drawn) == pytest.approx(100 * hits.mean(), abs=1e-9)


def test_vcr_leaderboard_file_has_twenty_probabilities() -> None:
    header, line = format_vcr_csv([("test-0", [0.1, 0.2, 0.3, 0.4], [[0.25] * 4] * 4)]).splitlines()
    assert header.split(",")[:6] == ["annot_id", *(f"answer_{i}" for i in range(4)), "rationale_conditioned_on_a0_0"]
    assert len(header.split(",")) == len(line.split(",")) == 21
    assert line.startswith("test-0,0.100000,0.200000")


HYPOTHESES = [
    ("nobody is here", "contradiction"),
    ("the man sleeps", "contradiction"),
    ("a man outside", "entailment"),
    ("a man outside", "entailment"),
    ("tall man", "neutral"),
]


def test_hypothesis_only_finds_words_that_predict_a_label() -> None:
    guess = HypothesisOnly(HYPOTHESES)
    assert [guess.predict(text) for text in ("Nobody!", "outside, a dog", "tall man")] == [
        "contradiction",
        "entailment",
        "neutral",
    ]
    assert guess.predict("words not in train") == "contradiction", "the most common label, the first of equals"
    assert HypothesisOnly([]).predict("a man") == ""
    marked = HypothesisOnly([("कि", "yes"), ("की", "no"), ("狗跑", "yes"), ("猫跑", "no")])
    assert [marked.predict(text) for text in ("कि", "की", "狗", "猫")] == ["yes", "no", "yes", "no"], "vowel signs"


def test_hypothesis_only_equals_naive_bayes_by_hand() -> None:
    """P(label) times P(feature | label) for each feature, with add-one smoothing."""
    guess = HypothesisOnly(HYPOTHESES)
    distinct = {"nobody", "is", "here", "the", "man", "sleeps", "a", "outside", "tall"}
    distinct |= {"nobody is", "is here", "the man", "man sleeps", "a man", "man outside", "tall man"}
    totals = {"contradiction": 10, "entailment": 10, "neutral": 3}  # words and pairs of all hypotheses
    for label, prior, man, tall in (("contradiction", 2, 1, 0), ("entailment", 2, 2, 0), ("neutral", 1, 1, 1)):
        total = totals[label] + len(distinct)
        expected = math.log(prior) + sum(math.log((count + 1) / total) for count in (man, tall, tall))
        assert math.isclose(guess._score("tall man", label), expected)


verdicts_of_sentence = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6)  # label, prediction


@given(st.lists(verdicts_of_sentence, min_size=1, max_size=6), st.data())
def test_nlvr_scores_of_any_resample_equal_those_of_its_scripts(
    sentences: list[list[tuple[bool, bool]]], data: Any
) -> None:
    """Precision counts the images; a sentence is consistent unless one of its images is wrong."""
    judgments = [
        Judgment(group=str(sentence), label=label, prediction=prediction, item=f"{sentence}-{n}")
        for sentence, verdicts in enumerate(sentences)
        for n, (label, prediction) in enumerate(verdicts)
    ]
    accuracy, consistency = score_nlvr(judgments)
    assert (accuracy.n, consistency.n) == (len(judgments), len(sentences))
    drawn = data.draw(st.lists(st.sampled_from(range(len(sentences))), min_size=1, max_size=8))
    for numbers in (range(len(sentences)), drawn):
        right, inconsistent = [], set()
        for draw_number, number in enumerate(numbers):
            for label, prediction in sentences[number]:
                right.append(label == prediction)
                if label != prediction:
                    inconsistent.add(draw_number)
        groups = [str(number) for number in numbers]
        assert of_groups(accuracy, groups) == pytest.approx(100 * np.mean(right), abs=1e-9)
        assert of_groups(consistency, groups) == pytest.approx(100 * (1 - len(inconsistent) / len(numbers)), abs=1e-9)


def test_majority_and_official_csv() -> None:
    assert majority_label([True, True, False]) and not majority_label([True, False, False])
    assert format_nlvr_csv([("dev-1-0-0.png", True), ("dev-1-0-1.png", False)]) == (
        "dev-1-0-0.png,true\ndev-1-0-1.png,false\n"
    )


def test_no_judgments_give_no_score() -> None:
    assert [score.value for score in score_nlvr([])] == [None, None]
