"""Intervals cover what they claim."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from vlp_models.metrics.bootstrap import (
    LEVELS,
    MIN_GROUPS,
    interval,
    paired,
    resample,
    sum_by_group,
)
from vlp_models.metrics.score import Evidence, mean_percent, mean_score
from vlp_models.params import PromotionParams


def draw(rng: np.random.Generator, groups: int, share: float) -> Evidence:
    """Return evidence of groups of six items that are all right or all wrong."""
    right = np.repeat(rng.random(groups) < share, 6).astype(float)
    names = [str(i) for i in np.repeat(np.arange(groups), 6)]
    return Evidence(groups=names, parts_NK=np.column_stack([right, np.ones_like(right)]), statistic=mean_percent)


def test_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        low, high = interval(draw(rng, 80, 0.6), resamples=400, seed=i)  # type: ignore[misc]
        inside += low <= 60 <= high
    assert 0.89 <= inside / 200 <= 0.99


def test_resampling_items_instead_of_groups_is_too_narrow() -> None:
    evidence = draw(np.random.default_rng(1), 80, 0.6)
    by_item = Evidence(groups=[str(i) for i in range(480)], parts_NK=evidence.parts_NK, statistic=evidence.statistic)
    low, high = interval(evidence, resamples=1000, seed=0)  # type: ignore[misc]
    narrow_low, narrow_high = interval(by_item, resamples=1000, seed=0)  # type: ignore[misc]
    assert (high - low) > 2 * (narrow_high - narrow_low)
    assert interval(evidence, resamples=1000, seed=0) == (low, high) != interval(evidence, resamples=1000, seed=1)


def test_groups_keep_their_names_whatever_their_length() -> None:
    names, sums = sum_by_group(["b", "a\0", "é", "a", "b"], np.array([[1.0], [2.0], [4.0], [8.0], [16.0]]))
    assert names == ["a", "a\0", "b", "é"] and sums.tolist() == [[8.0], [2.0], [17.0], [4.0]]
    empty, none = sum_by_group([], np.zeros((0, 2)))
    assert empty == [] and none.shape == (0, 2)
    groups = ["x" * 40_000, *(str(i) for i in range(3000))]
    tracemalloc.start()
    try:
        sum_by_group(groups, np.ones((len(groups), 2)))
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


def test_below_twenty_groups_there_is_no_interval() -> None:
    names = [str(i) for i in range(MIN_GROUPS)]
    few, enough = (
        mean_score("accuracy", [1.0, 0.0] * (n // 2), names[:n]).evidence for n in (MIN_GROUPS - 2, MIN_GROUPS)
    )
    assert interval(few, resamples=100, seed=0) is None and interval(enough, resamples=100, seed=0) is not None
    assert PromotionParams().min_images == MIN_GROUPS == 20


def test_coverage_of_a_skewed_metric_by_the_number_of_groups() -> None:
    """Why 20: CIDEr per image is about as skewed as the exponential distribution (docs/concepts/gate.md)."""
    rng = np.random.default_rng(0)

    def coverage(groups: int) -> float:
        inside = 0
        for _ in range(1000):
            values = rng.exponential(size=(groups, 1))
            low, high = np.percentile(resample(values, 400, int(rng.integers(2**31))), LEVELS)
            inside += low <= groups <= high
        return inside / 1000

    assert coverage(4) < 0.78 and coverage(10) < 0.89 and 0.87 < coverage(MIN_GROUPS) < 0.95


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
