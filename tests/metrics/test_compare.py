"""Differences between designs against a plain loop, and against what is known of such made-up designs."""

from __future__ import annotations

import numpy as np
import pytest

from vlp_models.metrics.bootstrap import compare_variants, holm
from vlp_models.metrics.score import Evidence, mean_score

IMAGES, QUESTIONS = 40, 3


def evidence(values: np.ndarray) -> Evidence:
    """Values of QUESTIONS questions of each of IMAGES images."""
    groups = [f"i{n // QUESTIONS:02d}" for n in range(len(values))]
    found = mean_score("accuracy", values.tolist(), groups, items=[f"q{n}" for n in range(len(values))]).evidence
    assert found is not None
    return found


def design(seeds: int, mean: float, *, seed_spread: float = 0.0, number: int = 0) -> list[Evidence]:
    """Runs that share the items' difficulty, shifted by seed."""
    rng = np.random.default_rng(number)
    difficulty = np.random.default_rng(99).normal(0, 0.2, IMAGES * QUESTIONS)
    shifts = rng.normal(0, seed_spread, seeds)
    return [evidence(mean + difficulty + shift + rng.normal(0, 0.05, len(difficulty))) for shift in shifts]


def test_it_is_the_plain_loop_over_seeds_and_images() -> None:
    a, b = design(3, 0.6, seed_spread=0.05, number=1), design(2, 0.5, seed_spread=0.05, number=2)
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
            of_all = np.mean([values(run)[images].mean() for run in runs])
            of_drawn = np.mean([values(runs[s])[images].mean() for s in seeds])
            means.append(of_all)
            deviations.append((of_drawn - of_all) * np.sqrt(len(runs) / (len(runs) - 1)))
        student = 3.182 / 1.960  # 3 + 2 - 2 degrees of freedom
        drawn.append(means[0] - means[1] + student * (deviations[0] - deviations[1]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert found.low is not None and found.high is not None
    assert found.value == pytest.approx(np.mean([values(r).mean() for r in a]) - np.mean([values(r).mean() for r in b]))
    assert found.low == pytest.approx(low, abs=0.6) and found.high == pytest.approx(high, abs=0.6)
    assert found.includes_seeds and found.seeds == (3, 2) and found.groups == IMAGES


def test_seeds_widen_the_interval_and_one_seed_leaves_the_items_alone() -> None:
    a, b = design(4, 0.6, seed_spread=0.1, number=1), design(4, 0.5, seed_spread=0.1, number=2)

    def width(x: list[Evidence], y: list[Evidence]) -> tuple[float, bool]:
        (found,) = compare_variants({"a": x, "b": y}, resamples=2000, seed=1)
        assert found.low is not None and found.high is not None
        return found.high - found.low, found.includes_seeds

    over_both, said = width(a, b)
    items, said_items = width(a[:1], b[:1])
    one_sided, said_one = width(a, b[:1])
    assert said and not said_items and not said_one
    assert over_both > 3 * items and one_sided < over_both / 2


def test_equal_designs_can_not_be_told_apart_and_different_ones_can() -> None:
    same = {"a": design(3, 0.5, seed_spread=0.02, number=1), "b": design(3, 0.5, seed_spread=0.02, number=2)}
    assert not compare_variants(same, resamples=1000, seed=1)[0].is_significant
    apart = {**same, "c": design(3, 0.9, seed_spread=0.02, number=3)}
    found = {(d.a, d.b): d for d in compare_variants(apart, resamples=1000, seed=1)}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["a", "c"].is_significant and found["a", "c"].value < 0 and not found["a", "b"].is_significant
    assert found["a", "c"].p == pytest.approx(2 / 1001) and found["a", "c"].p_holm == pytest.approx(6 / 1001)
    run = design(1, 0.5)
    (itself,) = compare_variants({"a": run, "b": run}, resamples=100, seed=1)
    assert (itself.value, itself.low, itself.high, itself.p) == (0.0, 0.0, 0.0, 1.0) and not itself.is_significant


def test_what_can_not_be_resampled_and_what_does_not_pair() -> None:
    one_image = [evidence(np.array([1.0, 0.0, 1.0]))]
    (found,) = compare_variants({"a": one_image, "b": one_image}, resamples=100, seed=1)
    assert found.value == 0 and found.low is None and found.p_holm is None and not found.is_significant
    with pytest.raises(ValueError, match="same groups"):
        compare_variants({"a": one_image, "b": design(1, 0.5)}, resamples=100, seed=1)
    with pytest.raises(ValueError, match="one run or more"):
        compare_variants({"a": one_image, "b": []}, resamples=100, seed=1)
    assert compare_variants({"a": one_image}, resamples=100, seed=1) == []


def test_holms_correction_as_in_the_textbook() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_difference_of_noise_is_rarely_called_one(seeds: int) -> None:
    """Of 200 pairs of equal designs about 10 are told apart, whether their seeds are many or few."""
    called = 0
    for trial in range(200):
        numbers = {"a": 1000 + 2 * trial, "b": 1001 + 2 * trial}
        pair = {name: design(seeds, 0.5, seed_spread=0.05, number=n) for name, n in numbers.items()}
        called += compare_variants(pair, resamples=400, seed=trial)[0].is_significant
    assert called <= 20
