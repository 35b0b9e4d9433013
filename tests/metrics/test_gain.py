"""The test of a gain keeps its error where gains are skewed, and finds what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlp_models.metrics.gain import LEVEL, Gain, gain_over_seeds
from vlp_models.metrics.score import Evidence, bleu_percent, mean_percent, mean_score

ROOT = Path(__file__).parents[2]


def measure_gain(gain_N: np.ndarray, size_N: np.ndarray | None = None) -> Gain:
    """Measure these gains per item (or per cluster of `size_N` items) over a model that scores 0."""
    size_N = np.ones(len(gain_N)) if size_N is None else size_N
    names = [f"{i:04d}" for i in range(len(gain_N))]
    better, zero = (
        Evidence(groups=names, parts_NK=np.column_stack([score_N * size_N, size_N]), statistic=mean_percent)
        for score_N in (gain_N, np.zeros(len(gain_N)))
    )
    gain = gain_over_seeds([better], [zero], seed_std=0, resamples=1000, seed=0)
    assert gain is not None
    return gain


POPE = np.loadtxt(ROOT / "benchmarks/gains/pope_f1.csv", skiprows=1)
TIES = np.repeat([-1.0, 1.0, 0.0], [8, 3, 189])  # lost and won right or wrong answers


@pytest.mark.parametrize("name", ["exponential", "lognormal", "rare", "pope", "ties"])
def test_many_small_wins_and_few_large_losses_are_no_gain(name: str) -> None:
    """Gains of mean zero, 50 items: the budget of 5% holds, which a bootstrap with sign flips exceeds.

    benchmarks/gate.py has more shapes and more comparisons of each.
    """
    rng, shape = np.random.default_rng([5, *name.encode()]), (300, 50)
    gains_BN = {
        "exponential": lambda: 1 - rng.exponential(size=shape),
        "lognormal": lambda: np.exp(0.5) - rng.lognormal(size=shape),
        "rare": lambda: np.where(rng.random(shape) < 0.05, -0.95, 0.05),
        "pope": lambda: rng.choice(POPE.mean() - POPE, shape),
        "ties": lambda: rng.choice(TIES - TIES.mean(), shape),
    }[name]()
    gains = [measure_gain(gain_N) for gain_N in gains_BN]
    # 300 comparisons: a standard error of 1.3 points at 5%
    assert np.mean([gain.p_value(0) <= 0.05 for gain in gains]) <= 0.07
    assert np.mean([bootstrap_and_flips(gain) <= 0.05 for gain in gains]) > 0.07


def bootstrap_and_flips(gain: Gain) -> float:
    """Return the p-value without the tests of skewness and of rare losses."""
    return float(max((gain.bootstrap_S <= 0).mean(), (gain.chance_S >= gain.value).mean()))


def test_right_and_wrong_answers_are_decided_by_the_sign_test() -> None:
    """The sign flips are exact there, and skewness and rare losses take nothing from their power."""
    binomial = {(5, 0): 1 / 32, (9, 2): 67 / 2048, (12, 4): 2517 / 65536, (25, 10): 0.00834, (9, 3): 299 / 4096}
    for (wins, losses), exact in binomial.items():
        for ties in (25, 300):
            gain_N = np.repeat([1.0, -1.0, 0.0], [wins, losses, ties])
            p = measure_gain(gain_N).p_value(0)
            assert p == pytest.approx(exact, abs=0.025), (wins, losses, ties)
            assert (p <= 0.05) == (exact <= 0.05), (wins, losses, ties)
    assert measure_gain(np.ones(50)).p_value(0) <= 0.001  # all wrong answers became right


def test_symmetric_gains_and_corpus_metrics_keep_their_power() -> None:
    """Of normal gains and of BLEU, the p-value is that of a t-test, and of the bootstrap and the flips alone."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        gain = measure_gain(rng.normal(0.3, 1, 60))
        assert gain.p_value(0) == pytest.approx(bootstrap_and_flips(gain), abs=0.03)
    names = [str(i) for i in range(200)]

    def captions(quality: float) -> Evidence:
        guessed_NK = rng.integers(6, 12, 200)[:, None] - np.arange(4)
        correct_NK = rng.binomial(guessed_NK, quality ** np.arange(1, 5))
        lengths_NK = np.repeat(guessed_NK[:, :1], 2, axis=1)
        parts_NK = np.hstack([correct_NK, guessed_NK, lengths_NK]).astype(float)
        return Evidence(groups=names, parts_NK=parts_NK, statistic=lambda sums_SK: bleu_percent(sums_SK, 4))

    for _ in range(10):
        bleu_gain = gain_over_seeds([captions(0.72)], [captions(0.7)], seed_std=0, resamples=1000, seed=0)
        assert bleu_gain is not None
        assert bleu_gain.p_value(0) == pytest.approx(bootstrap_and_flips(bleu_gain), abs=0.03)


def test_clusters_whose_gain_depends_on_their_size() -> None:
    rng = np.random.default_rng(4)
    promoted = []
    for _ in range(300):
        size_C = rng.integers(1, 21, 100).astype(float)
        gain_C = 0.1 * (41 / 3 - size_C) + rng.normal(0, 0.5, 100)  # the mean over items is zero
        promoted.append(measure_gain(gain_C, size_C).p_value(0) <= 0.05)
    assert np.mean(promoted) <= 0.075


def test_the_interval_ends_where_p_is_alpha() -> None:
    gain = measure_gain(np.random.default_rng(0).exponential(size=80) - 0.8)
    low, high = gain.interval(0.025)
    assert gain.p_value(low) == pytest.approx(0.025, abs=0.003) and low < gain.value < high
    assert gain.two_sided_p() == pytest.approx(2 * gain.p_value(0))
    reversed_gain = measure_gain(0.8 - np.random.default_rng(0).exponential(size=80))
    assert reversed_gain.two_sided_p() == pytest.approx(gain.two_sided_p(), abs=0.02)
    assert reversed_gain.interval(0.025) == pytest.approx((-high, -low), abs=2)


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


def compared(x: list[Evidence], y: list[Evidence], *, resamples: int = 2000, seed: int = 1) -> Gain:
    gain = gain_over_seeds(x, y, seed_std=0, resamples=resamples, seed=seed)
    assert gain is not None
    return gain


def test_seeds_widen_the_interval_and_one_seed_covers_items_only() -> None:
    a, b = make_variant(4, 0.6, seed_spread=0.1, number=1), make_variant(4, 0.5, seed_spread=0.1, number=2)
    both, items, one_sided = compared(a, b), compared(a[:1], b[:1]), compared(a, b[:1])
    assert both.seed_std and one_sided.seed_std and items.seed_std is None
    width, items_width, one_sided_width = (np.ptp(gain.interval(0.025)) for gain in (both, items, one_sided))
    assert items_width < width < one_sided_width  # a side of one run has the deviation of the other's
    assert width > 3 * items_width


def test_single_groups_and_unpaired_runs() -> None:
    one_image = [evidence(np.array([1.0, 0.0, 1.0]))]
    assert gain_over_seeds(one_image, one_image, seed_std=0, resamples=100, seed=1) is None
    with pytest.raises(ValueError, match="same groups"):
        compared(one_image, make_variant(1, 0.5))
    with pytest.raises(ValueError, match="at least one run"):
        compared(one_image, [])


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_false_positive_rate_of_equal_variants(seeds: int) -> None:
    """About 10 of 200 pairs of equal variants are significant, with few seeds and with many."""
    called = 0
    for trial in range(200):
        a, b = (make_variant(seeds, 0.5, seed_spread=0.05, number=1000 + 2 * trial + side) for side in (0, 1))
        gain = compared(a, b, resamples=400, seed=trial)
        low, high = gain.interval((1 - LEVEL) / 2)
        called += not low <= 0 <= high and gain.two_sided_p() < 1 - LEVEL
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
