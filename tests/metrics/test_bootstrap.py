"""Intervals cover what they claim; pairwise comparisons against a plain loop and on made-up variants."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from vlp_models.metrics.bootstrap import (
    LEVELS,
    MIN_GROUPS,
    compare_variants,
    gain_over_seeds,
    holm,
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


def test_interval_depends_only_on_its_seed() -> None:
    evidence = draw(np.random.default_rng(1), 50, 0.6)
    assert interval(evidence, resamples=100, seed=3) == interval(evidence, resamples=100, seed=3)
    assert interval(evidence, resamples=100, seed=3) != interval(evidence, resamples=100, seed=4)


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


IMAGES, QUESTIONS = 40, 3


def evidence(values: np.ndarray) -> Evidence:
    """Return the evidence of QUESTIONS questions about each of IMAGES images."""
    groups = [f"i{n // QUESTIONS:02d}" for n in range(len(values))]
    found = mean_score("accuracy", values.tolist(), groups, items=[f"q{n}" for n in range(len(values))]).evidence
    assert found is not None
    return found


def make_variant(seeds: int, mean: float, *, seed_spread: float = 0.0, number: int = 0) -> list[Evidence]:
    """Return runs that share the items' difficulty, shifted by seed."""
    rng = np.random.default_rng(number)
    difficulty = np.random.default_rng(99).normal(0, 0.2, IMAGES * QUESTIONS)
    shifts = rng.normal(0, seed_spread, seeds)
    return [evidence(mean + difficulty + shift + rng.normal(0, 0.05, len(difficulty))) for shift in shifts]


def test_comparison_equals_a_plain_loop_over_seeds_and_images() -> None:
    a, b = make_variant(3, 0.6, seed_spread=0.05, number=1), make_variant(2, 0.5, seed_spread=0.05, number=2)
    (found,) = compare_variants({"a": a, "b": b}, resamples=4000, seed=1)
    rng = np.random.default_rng(7)

    def values(run: Evidence) -> np.ndarray:
        return 100 * run.parts_NK[:, 0].reshape(IMAGES, QUESTIONS)

    drawn = []
    for _ in range(4000):
        images = rng.integers(IMAGES, size=IMAGES)
        means, deviations = [], []
        for runs in (a, b):
            seeds = rng.integers(len(runs), size=len(runs))
            all_seeds = np.mean([values(run)[images].mean() for run in runs])
            drawn_seeds = np.mean([values(runs[s])[images].mean() for s in seeds])
            means.append(all_seeds)
            deviations.append((drawn_seeds - all_seeds) * np.sqrt(len(runs) / (len(runs) - 1)))
        student = 3.182 / 1.960  # 3 + 2 - 2 degrees of freedom
        drawn.append(means[0] - means[1] + student * (deviations[0] - deviations[1]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert found.low is not None and found.high is not None
    assert found.value == pytest.approx(np.mean([values(r).mean() for r in a]) - np.mean([values(r).mean() for r in b]))
    assert found.low == pytest.approx(low, abs=0.6) and found.high == pytest.approx(high, abs=0.6)
    assert found.includes_seeds and found.seeds == (3, 2) and found.groups == IMAGES


def test_seeds_widen_the_interval_and_one_seed_covers_items_only() -> None:
    a, b = make_variant(4, 0.6, seed_spread=0.1, number=1), make_variant(4, 0.5, seed_spread=0.1, number=2)

    def width(x: list[Evidence], y: list[Evidence]) -> tuple[float, bool]:
        (found,) = compare_variants({"a": x, "b": y}, resamples=2000, seed=1)
        assert found.low is not None and found.high is not None
        return found.high - found.low, found.includes_seeds

    both, both_include_seeds = width(a, b)
    items, items_include_seeds = width(a[:1], b[:1])
    one_sided, one_includes_seeds = width(a, b[:1])
    assert both_include_seeds and not items_include_seeds and not one_includes_seeds
    assert both > 3 * items and one_sided < both / 2


def test_equal_variants_are_inconclusive_and_different_ones_significant() -> None:
    same = {
        "a": make_variant(3, 0.5, seed_spread=0.02, number=1),
        "b": make_variant(3, 0.5, seed_spread=0.02, number=2),
    }
    assert not compare_variants(same, resamples=1000, seed=1)[0].is_significant
    apart = {**same, "c": make_variant(3, 0.9, seed_spread=0.02, number=3)}
    found = {(d.a, d.b): d for d in compare_variants(apart, resamples=1000, seed=1)}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["a", "c"].is_significant and found["a", "c"].value < 0 and not found["a", "b"].is_significant
    assert found["a", "c"].p == pytest.approx(2 / 1001) and found["a", "c"].p_holm == pytest.approx(6 / 1001)
    run = make_variant(1, 0.5)
    (itself,) = compare_variants({"a": run, "b": run}, resamples=100, seed=1)
    assert (itself.value, itself.low, itself.high, itself.p) == (0.0, 0.0, 0.0, 1.0) and not itself.is_significant


def test_below_twenty_groups_no_variant_is_better() -> None:
    def pair(groups: int) -> dict[str, list[Evidence]]:
        right, wrong = np.ones(groups * QUESTIONS), np.zeros(groups * QUESTIONS)
        return {"a": [evidence(right)], "b": [evidence(wrong)]}

    for groups in (2, MIN_GROUPS - 1):
        (few,) = compare_variants(pair(groups), resamples=1000, seed=1)
        assert (few.value, few.low, few.high, few.p, few.p_holm) == (100.0, None, None, None, None)
        assert few.groups == groups and not few.is_significant
    assert compare_variants(pair(MIN_GROUPS), resamples=1000, seed=1)[0].is_significant


def test_single_groups_and_unpaired_runs() -> None:
    one_image = [evidence(np.array([1.0, 0.0, 1.0]))]
    (found,) = compare_variants({"a": one_image, "b": one_image}, resamples=100, seed=1)
    assert found.value == 0 and found.low is None and found.p_holm is None and not found.is_significant
    with pytest.raises(ValueError, match="same groups"):
        compare_variants({"a": one_image, "b": make_variant(1, 0.5)}, resamples=100, seed=1)
    with pytest.raises(ValueError, match="at least one run"):
        compare_variants({"a": one_image, "b": []}, resamples=100, seed=1)
    assert compare_variants({"a": one_image}, resamples=100, seed=1) == []


def test_holm_correction_equals_a_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_false_positive_rate_of_equal_variants(seeds: int) -> None:
    """About 10 of 200 pairs of equal variants are significant, with few seeds and with many."""
    called = 0
    for trial in range(200):
        numbers = {"a": 1000 + 2 * trial, "b": 1001 + 2 * trial}
        pair = {name: make_variant(seeds, 0.5, seed_spread=0.05, number=n) for name, n in numbers.items()}
        called += compare_variants(pair, resamples=400, seed=trial)[0].is_significant
    assert called <= 20


def test_equal_totals_of_two_runs_leave_the_items_variance() -> None:
    """Their noise on single items is still there. Without a deviation to hold it, one seed more made a verdict."""
    rng = np.random.default_rng(0)
    right = [set(rng.permutation(100)[:count]) for count in (50, 56, 56)]  # the two runs of one side: other items
    old, *new = [
        mean_score("accuracy", [float(i in one) for i in range(100)], [str(i) for i in range(100)]).evidence
        for one in right
    ]
    alone, both = (gain_over_seeds(runs, [old], seed_std=0, resamples=2000, seed=0) for runs in (new[:1], new))
    assert alone is not None and both is not None and both.seeds == pytest.approx(0, abs=1e-12)
    assert both.p_value(0) > 0.1 and both.items > 0.7 * alone.items  # of a mean of two runs against one
