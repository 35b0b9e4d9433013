"""NLVR's two numbers over permutations; intervals that cover what they claim to."""

from __future__ import annotations

import numpy as np
import pytest

from vlp_models.metrics.bootstrap import interval, paired
from vlp_models.metrics.classification import Judgment, majority_label, official_csv, score_nlvr
from vlp_models.metrics.score import Evidence, mean_percent, mean_score


def test_permutations_count_singly_for_accuracy_and_together_for_consistency() -> None:
    """Two sentences of six permuted images; one image of the second is judged wrong."""
    judgements = [Judgment(group=g, label=True, prediction=(g, k) != ("b", 5)) for g in "ab" for k in range(6)]
    accuracy, consistency = score_nlvr(judgements)
    assert accuracy.value == pytest.approx(100 * 11 / 12) and accuracy.n == 12
    assert consistency.value == 50 and consistency.n == 2
    assert accuracy.evidence is not None and set(accuracy.evidence.groups) == {"a", "b"}


def test_majority_and_official_csv() -> None:
    assert majority_label([True, True, False]) and not majority_label([True, False, False])
    assert official_csv([("dev-1-0-0.png", True), ("dev-1-0-1.png", False)]) == (
        "dev-1-0-0.png,true\ndev-1-0-1.png,false\n"
    )


def test_no_judgement_is_no_number() -> None:
    assert [score.value for score in score_nlvr([])] == [None, None]


def draw(rng: np.random.Generator, groups: int, share: float) -> Evidence:
    """Groups of six items that are all right or all wrong together."""
    right = np.repeat(rng.random(groups) < share, 6).astype(float)
    names = [str(i) for i in np.repeat(np.arange(groups), 6)]
    return Evidence(groups=names, parts_NK=np.column_stack([right, np.ones_like(right)]), statistic=mean_percent)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        low, high = interval(draw(rng, 80, 0.6), resamples=400, seed=i)  # type: ignore[misc]
        inside += low <= 60 <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_resampling_items_instead_of_groups_would_be_too_sure() -> None:
    evidence = draw(np.random.default_rng(1), 80, 0.6)
    by_item = Evidence(groups=[str(i) for i in range(480)], parts_NK=evidence.parts_NK, statistic=evidence.statistic)
    low, high = interval(evidence, resamples=1000, seed=0)  # type: ignore[misc]
    narrow_low, narrow_high = interval(by_item, resamples=1000, seed=0)  # type: ignore[misc]
    assert (high - low) > 2 * (narrow_high - narrow_low)


def test_interval_is_a_function_of_its_seed() -> None:
    evidence = draw(np.random.default_rng(1), 50, 0.6)
    assert interval(evidence, resamples=100, seed=3) == interval(evidence, resamples=100, seed=3)
    assert interval(evidence, resamples=100, seed=3) != interval(evidence, resamples=100, seed=4)


def test_one_group_says_nothing_of_its_spread() -> None:
    score = mean_score("accuracy", [1.0, 0.0], ["a", "a"])
    assert interval(score.evidence, resamples=100, seed=0) is None


def test_paired_difference_is_tighter_than_two_intervals() -> None:
    rng = np.random.default_rng(2)
    base = (rng.random(300) < 0.6).astype(float)
    better = np.maximum(base, rng.random(300) < 0.1)
    names = [str(i) for i in range(300)]
    a, b = mean_score("a", better, names), mean_score("b", base, names)
    assert a.evidence is not None and b.evidence is not None and a.value is not None and b.value is not None
    difference = paired(a.evidence, b.evidence)
    assert difference.statistic(difference.parts_NK.sum(0, keepdims=True))[0] == pytest.approx(a.value - b.value)
    low, high = interval(difference, resamples=1000, seed=0)  # type: ignore[misc]
    assert 0 < low < a.value - b.value < high
    alone = interval(a.evidence, resamples=1000, seed=0)
    assert alone is not None and high - low < alone[1] - alone[0]
    with pytest.raises(ValueError, match="same groups"):
        paired(a.evidence, mean_score("c", [1.0], ["x"]).evidence)  # type: ignore[arg-type]
