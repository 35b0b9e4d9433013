"""Accuracy, recalls and macro F1 by hand, and what a file of items takes and refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.classification import LabeledItem, most_common_label, score_labels
from vlp_models.metrics.score import Evidence, FloatArray, Score, item_scores, macro_f1_percent, read_items, write_items

LABELS = ("a", "b", "c")
PAIRS = ["aa", "aa", "ab", "bb", "ba", "cc"]  # label, prediction


def rows() -> list[LabeledItem]:
    return [LabeledItem(group=f"g{i // 2}", item=f"i{i}", label=p[0], prediction=p[1]) for i, p in enumerate(PAIRS)]


def test_scores_are_those_worked_out_by_hand() -> None:
    found = {score.metric: score for score in score_labels(rows(), LABELS)}
    assert found["accuracy"].value == pytest.approx(100 * 4 / 6)
    assert found["recall (a)"].value == pytest.approx(100 * 2 / 3) and found["recall (a)"].n == 3
    assert found["recall (c)"].value == 100
    # F1: a 2*2/(4+1+1), b 2*1/(2+1+1), c 1
    assert found["macro F1"].value == pytest.approx(100 * (4 / 6 + 2 / 4 + 1) / 3)
    ends = interval(found["macro F1"].evidence, resamples=200, seed=1)
    assert ends is not None and ends[0] <= found["macro F1"].value <= ends[1]


def test_a_label_that_does_not_occur_does_not_count() -> None:
    both = np.array([[1.0, 0, 0, 0, 1, 0, 0, 0, 0]])
    assert macro_f1_percent(both)[0] == 100
    only = [LabeledItem(group="g", item="i", label="a", prediction="a")]
    missing = {score.metric: score for score in score_labels(only, LABELS)}["recall (b)"]
    assert missing.value is None and missing.note.startswith("not computed")
    assert score_labels([], LABELS)[1].value is None
    assert most_common_label(["b", "a", "b", "a"]) == "a" and most_common_label([]) == ""


def test_items_give_the_score_back(tmp_path: Path) -> None:
    place = {"dataset": "d", "split": "test", "test": "t"}
    scores = score_labels(rows(), LABELS)
    kept = [found for score in scores if (found := item_scores(score, **place, slices={}))]
    write_items(tmp_path / "items.parquet", kept)
    back = {items.metric: items for items in read_items(tmp_path / "items.parquet")}
    assert set(back) == {"accuracy", "macro F1", "recall (a)", "recall (b)", "recall (c)"}
    for score in scores:
        evidence = back[score.metric].evidence()
        assert evidence.statistic(evidence.parts_NK.sum(0, keepdims=True))[0] == pytest.approx(score.value)


def test_an_unregistered_statistic_is_an_error_unless_the_score_is_not_to_be_kept() -> None:
    def own(sums_SK: FloatArray) -> FloatArray:
        return sums_SK[:, 0]

    evidence = Evidence(groups=["a", "b"], parts_NK=np.ones((2, 1)), statistic=own)
    score = Score(metric="odd", value=2.0, n=2, evidence=evidence)
    with pytest.raises(ValueError, match="odd: its statistic is none of mean"):
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
