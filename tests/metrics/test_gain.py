"""The test of a gain keeps its error where gains are skewed, and finds what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vlp_models.metrics.gain import LEVEL, Gain, gain_over_seeds
from vlp_models.metrics.score import Evidence, bleu_percent, mean_percent, mean_score

ROOT = Path(__file__).parents[2]


def measure_gain(gain_N: np.ndarray, size_N: np.ndarray | None = None) -> Gain:
    """Measure these gains per item (or per cluster of `size_N` items) over a model that scores between 0 and 1."""
    size_N = np.ones(len(gain_N)) if size_N is None else size_N
    names = [f"{i:04d}" for i in range(len(gain_N))]
    before_N = np.random.default_rng(0).random(len(gain_N))
    better, before = (
        Evidence(groups=names, parts_NK=np.column_stack([score_N * size_N, size_N]), statistic=mean_percent)
        for score_N in (before_N + gain_N, before_N)
    )
    gain = gain_over_seeds([better], [before], seed_std=0, resamples=1000, seed=0)
    assert gain is not None
    return gain


def measure_answers(right_N: np.ndarray, right_before_N: np.ndarray) -> Gain:
    names = [f"{i:04d}" for i in range(len(right_N))]
    runs = [
        Evidence(groups=names, parts_NK=np.column_stack([side_N, np.ones(len(side_N))]), statistic=mean_percent)
        for side_N in (right_N, right_before_N)
    ]
    gain = gain_over_seeds(runs[:1], runs[1:], seed_std=0, resamples=4000, seed=0)
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
    assert np.mean([plain_bootstrap(gain_N) <= 0.05 for gain_N in gains_BN]) > 0.07


def plain_bootstrap(gain_N: np.ndarray) -> float:
    """Return the p-value of a percentile bootstrap over items."""
    count = len(gain_N)
    counts_SN = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=1000)
    return float((counts_SN @ gain_N <= 0).mean())


def reference_p(gain_N: np.ndarray, resamples: int = 4000) -> float:
    """Return the p-value of gain > 0 item by item: random signs, and the studentized bootstrap with one more loss."""
    rng, count = np.random.default_rng(1), len(gain_N)
    by_chance = hidden = 0.0
    mean = np.mean(gain_N)
    with_one_more = [*gain_N, mean - max(gain_N.max() - mean, (mean - gain_N.min()) * (1 + 9 / np.sqrt(count)))]
    center = np.mean(with_one_more)
    for _ in range(resamples):
        by_chance += np.sum(gain_N * rng.choice([-1, 1], count)) >= np.sum(gain_N)
        drawn = rng.choice(with_one_more, count)
        hidden += (np.mean(drawn) - center) / np.std(drawn) >= np.mean(gain_N) / np.std(gain_N)
    return max(by_chance, hidden) / resamples


@pytest.mark.parametrize("shape", ["normal", "exponential", "heavy tails", "gains in steps"])
def test_p_is_that_of_a_slow_reference(shape: str) -> None:
    rng = np.random.default_rng(len(shape))
    gain_N = {
        "normal": lambda: rng.normal(0.25, 1, 60),
        "exponential": lambda: 1.3 - rng.exponential(size=60),
        "heavy tails": lambda: 0.4 + rng.standard_t(3, 60),
        "gains in steps": lambda: rng.choice([-1.0, -0.3, 0.3, 1.0], 60, p=[0.15, 0.2, 0.4, 0.25]),
    }[shape]()
    assert measure_gain(gain_N).p_value(0) == pytest.approx(reference_p(gain_N), abs=0.02)


def test_large_tests_are_resampled_by_cells_of_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many items the counts of each score are drawn, not those of each item: the same quantiles."""
    rng = np.random.default_rng(2)
    for gain_N in (rng.choice([-1.0, 0.0, 0.5, 1.0], 900), rng.standard_t(4, 900) + 0.05):
        by_item = measure_gain(gain_N)
        monkeypatch.setattr("vlp_models.metrics.gain.CELLS", 400)
        by_cell = measure_gain(gain_N)
        monkeypatch.undo()
        for name in ("chance_S", "low_S", "high_S"):
            quantiles = [np.quantile(getattr(gain, name), [0.05, 0.5, 0.95]) for gain in (by_item, by_cell)]
            assert quantiles[0] == pytest.approx(quantiles[1], abs=0.15 * by_item.items), name
        assert by_cell.items == pytest.approx(by_item.items)


def test_right_and_wrong_answers_are_decided_by_the_sign_test() -> None:
    """The sign flips are exact there, with ties counted half, and no other test takes from their power."""
    for wins, losses in ((5, 0), (9, 2), (12, 4), (25, 10), (9, 3)):
        exact = stats.binom.sf(wins, wins + losses, 0.5) + stats.binom.pmf(wins, wins + losses, 0.5) / 2
        for ties in (25, 300):
            gain_N = np.repeat([1.0, -1.0, 0.0], [wins, losses, ties])
            gain = measure_answers(gain_N > 0, gain_N < 0)
            assert gain.signs_decide
            assert gain.p_value(0) == pytest.approx(exact, abs=0.012), (wins, losses, ties)
    assert measure_gain(np.ones(50)).p_value(0) <= 0.001  # all wrong answers became right


def test_a_loss_that_the_sample_may_have_missed() -> None:
    """Small wins on all items show nothing if a loss may be as large as scores differ; large ones do, in any unit."""
    for noise in (0.0, 1e-6, 1e-3):
        small, large = (measure_gain(np.full(40, size) + np.arange(40) % 7 * noise) for size in (0.02, 0.5))
        assert small.p_value(0) > 0.2 and large.p_value(0) < 0.01
    won_N = np.repeat([1.0, 0.0], [60, 40])
    scores_N = np.random.default_rng(0).integers(1, 10, 100)
    for unit in (1, 0.1, 100):
        sides = [
            mean_score("rating", (unit * side_N).tolist(), [str(i) for i in range(100)]).evidence
            for side_N in (scores_N + won_N, scores_N)
        ]
        assert sides[0] is not None and sides[1] is not None
        assert compared(sides[:1], sides[1:]).p_value(0) < 0.001


def test_corpus_metrics_keep_their_power() -> None:
    """The p-value of BLEU is that of its own resamples."""
    rng = np.random.default_rng(3)
    names = [str(i) for i in range(200)]
    counts_SN = np.random.default_rng(0).multinomial(200, np.full(200, 1 / 200), size=1000)

    def captions(quality: float) -> Evidence:
        guessed_NK = rng.integers(6, 12, 200)[:, None] - np.arange(4)
        correct_NK = rng.binomial(guessed_NK, quality ** np.arange(1, 5))
        lengths_NK = np.repeat(guessed_NK[:, :1], 2, axis=1)
        parts_NK = np.hstack([correct_NK, guessed_NK, lengths_NK]).astype(float)
        return Evidence(groups=names, parts_NK=parts_NK, statistic=lambda sums_SK: bleu_percent(sums_SK, 4))

    for _ in range(10):
        a, b = captions(0.72), captions(0.7)
        gain = gain_over_seeds([a], [b], seed_std=0, resamples=1000, seed=0)
        assert gain is not None
        resampled_S = a.statistic(counts_SN @ a.parts_NK) - b.statistic(counts_SN @ b.parts_NK)
        assert gain.p_value(0) == pytest.approx((resampled_S <= 0).mean(), abs=0.04)


def test_deviation_is_pooled_with_that_of_other_variants() -> None:
    """Two runs a side say little of how seeds differ; eight more of other variants say more."""
    a, b = make_variant(2, 0.6, seed_spread=0.02, number=1), make_variant(2, 0.5, seed_spread=0.02, number=2)
    alone = compared(a, b)
    pooled = gain_over_seeds(a, b, seed_std=0, resamples=2000, seed=1, pooled=(8 * 2.0**2, 8))
    assert pooled is not None and pooled.seed_std is not None and alone.seed_std is not None
    assert pooled.seed_std**2 == pytest.approx((2 * alone.seed_std**2 + 8 * 2.0**2) / 10)
    assert pooled.p_value(0) < alone.p_value(0)


def test_clusters_whose_gain_depends_on_their_size() -> None:
    rng = np.random.default_rng(4)
    promoted = []
    for _ in range(300):
        size_C = rng.integers(1, 21, 100).astype(float)
        gain_C = 0.1 * (41 / 3 - size_C) + rng.normal(0, 0.5, 100)  # the mean over items is zero
        promoted.append(measure_gain(gain_C, size_C).p_value(0) <= 0.05)
    assert np.mean(promoted) <= 0.075


def test_interval_and_p_agree() -> None:
    gain_N = np.random.default_rng(0).exponential(size=80) - 0.8
    gain, mirrored = measure_gain(gain_N), measure_gain(-gain_N)
    low, high = gain.interval(0.025)
    assert low < gain.value < high and np.mean(gain.ends_S[0] <= low) == pytest.approx(0.025, abs=0.003)
    assert mirrored.interval(0.025) == pytest.approx((-high, -low))
    assert mirrored.two_sided_p() == pytest.approx(gain.two_sided_p(), abs=0.02)  # the same signs for both
    right = np.random.default_rng(1).random(80) < 0.6
    answers = measure_answers(np.where(np.arange(80) < 12, True, right), right)
    for each in (gain, mirrored, answers):
        for alpha in np.arange(0.005, 0.3, 0.01):
            for threshold in (0.0, 5.0):
                low, high = each.interval(alpha, threshold)
                assert (low > threshold) == (each.p_value(threshold) <= alpha)
                assert (high < threshold) == (each.p_value_below(threshold) <= alpha)


def test_sides_swapped_give_the_same_p_and_interval() -> None:
    """Of skewed gains, where the two sides are unlike."""
    a, b = make_variant(1, 0.56, number=1), make_variant(1, 0.6, number=2)
    b = [evidence(b[0].parts_NK[:, 0] - np.random.default_rng(3).exponential(0.05, IMAGES * QUESTIONS))]
    gain, swapped = compared(a, b), compared(b, a)
    assert gain.p_value(0) == swapped.p_value_below(0) and gain.p_value_below(0) == swapped.p_value(0)
    assert 0 < gain.value < 5 and gain.p_value(0) != pytest.approx(1 - gain.p_value_below(0), abs=1e-3)
    low, high = gain.interval(0.025)
    assert swapped.interval(0.025) == pytest.approx((-high, -low))


def test_detectable_gain_does_not_depend_on_the_gain() -> None:
    rng = np.random.default_rng(6)
    gain_N = rng.normal(0, 0.4, 100)
    assert measure_gain(gain_N + 0.3).detectable(0, 0.025, 0.8) == pytest.approx(
        measure_gain(gain_N).detectable(0, 0.025, 0.8)
    )


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
    assert width > 2.5 * items_width


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
        called += gain.two_sided_p() < 1 - LEVEL
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
