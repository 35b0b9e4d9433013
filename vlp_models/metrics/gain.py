"""Is one variant better than another? The gain over items and seeds.

A gain is shown if two tests agree, each at the same error. p is the larger of the two.

1. Sign flips. Each group's share of the gain gets a random sign (a paired permutation test; Noreen, 1989,
   "Computer-intensive methods for testing hypotheses"); ties count half (mid-p; Lancaster, 1961, "Significance tests in
   discrete distributions"). The flips are exact where a gain and a loss of the same size are equally likely between
   equals. That is so for one run a side of right and wrong answers of independent items, where it is the only test.
2. Studentized bootstrap with one more loss. Where equals differ by many small wins and few large losses, a test set
   that misses some of the losses shows a gain with a small deviation. So each draw of the groups is measured in its own
   deviation (bootstrap-t; Efron and Tibshirani, 1993, "An introduction to the bootstrap", section 12.5), and groups are
   drawn from the test set and one more loss, worse than its worst (`WORSE`), which it may have missed.
   benchmarks/gate.py has shown this to be enough for lognormal losses.

A group's share is its jackknife pseudo-value, so this holds for any smooth statistic and any number of runs.

Seeds are a second level. Each draw also gets a draw of the seeds' variation: the difference of two means of k_a and k_b
runs whose values deviate by s, from Student's t. s is pooled from the runs of both sides, from runs of other variants,
and from a stated prior deviation, as in Smyth (2004), "Linear models and empirical Bayes": the stated deviation counts
like one measured with `PRIOR_DEGREES` degrees of freedom, so it decides if a side has one run and fades with many. What
runs of one side do differently on an item is in s: the draws of the items are shrunk by that part of their variance, at
most by s, which is 0 for runs with equal totals. With one run per side that part is unknown and stays (the interval is
then slightly wide).

Shape suffixes: G groups, C cells of groups with equal shares, K additive statistics, S draws, R runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from vlp_models.metrics.bootstrap import COUNTS_AT_ONCE, sum_by_group
from vlp_models.metrics.score import Evidence, FloatArray

LEVEL = 0.95
PRIOR_DEGREES = 10  # degrees of freedom of a stated deviation
SEED_DRAWS = 10  # draws of the seeds' variation per draw of the items: smooths the tails at no cost
WORSE = 9  # the added loss is 1 + WORSE / sqrt(groups) times the worst one
CELLS = 4096  # shares of large tests are distinguished to within 1 / 2048 of the largest


@dataclass(frozen=True, kw_only=True, eq=False)
class Gain:
    """The gain of variant a over variant b, in the metric's unit. Each array has the seeds' variation added.

    chance_S         distribution of the gain if the sides differ by chance only: random signs of the shares
    low_S, high_S    the gain less, and plus, what the sample may hide, by the bootstrap
    ends_S           the same with a missed loss (and gain) as bad as the worst, not worse: for the ends of the interval
    signs_decide     right and wrong answers: the random signs are the only test
    items, seeds     standard deviation due to items, and to seeds apart from what the runs do differently on the items
    seed_std         standard deviation of one run over seeds; None if unknown, and the draws are then over items only
    runs             number of runs of each side
    resamples        number of independent draws of the items
    """

    value: float
    chance_S: FloatArray
    low_S: FloatArray
    high_S: FloatArray
    ends_S: tuple[FloatArray, FloatArray]
    signs_decide: bool
    items: float
    seeds: float
    seed_std: float | None
    runs: tuple[int, int]
    groups: int
    resamples: int

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.value))

    def p_value(self, threshold: float) -> float:
        """Return the one-sided p-value of gain > threshold, the larger one of the tests; never 0."""
        excess = self.value - threshold
        # The tolerance counts a draw that equals the gain but for rounding.
        rounding = 1e-9 * abs(excess)
        larger, as_large = (self.chance_S > excess + rounding).mean(), (self.chance_S >= excess - rounding).mean()
        by_chance = float(larger + as_large) / 2  # ties count half
        below = 0.0 if self.signs_decide else float((self.low_S <= threshold).mean())
        # The observed gain is itself one of the equally likely outcomes, so it counts as one more draw.
        return (max(below, by_chance) * self.resamples + 1) / (self.resamples + 1)

    def p_value_below(self, threshold: float) -> float:
        """Return the one-sided p-value of gain < threshold."""
        # The same test for the other side: everything is mirrored.
        return self._mirrored().p_value(-threshold)

    def two_sided_p(self) -> float:
        """Return twice the smaller p-value of gain > 0 and of gain < 0."""
        return min(1.0, 2 * min(self.p_value(0.0), self.p_value_below(0.0)))

    def interval(self, alpha: float, threshold: float = 0.0) -> tuple[float, float]:
        """Return the ends of the interval; the gain is beyond each with probability `alpha` at most.

        The ends are the bootstrap's. Where they disagree with p about `threshold`, they are those of the tests.
        """
        return self._lower_end(alpha, threshold), -self._mirrored()._lower_end(alpha, -threshold)

    def _lower_end(self, alpha: float, threshold: float) -> float:
        is_above = self.p_value(threshold) <= alpha
        end = float(np.quantile(self.ends_S[0], alpha))
        if (end > threshold) != is_above:
            end = self.value - float(np.quantile(self.chance_S, 1 - alpha))
            if not self.signs_decide:
                end = min(end, float(np.quantile(self.low_S, alpha)))
            # p and a quantile of the same draws may differ by one draw.
            end = max(end, np.nextafter(threshold, np.inf)) if is_above else min(end, threshold)
        return end

    def _mirrored(self) -> Gain:
        """Return the gain of the other side: minus this one."""
        low_end_S, high_end_S = self.ends_S
        mirrored = {"value": -self.value, "chance_S": -self.chance_S, "ends_S": (-high_end_S, -low_end_S)}
        return Gain(**vars(self) | mirrored | {"low_S": -self.high_S, "high_S": -self.low_S})

    def detectable(self, threshold: float, alpha: float, power: float) -> float:
        """Return the smallest true gain that this test shows to be above `threshold` with probability `power`."""
        # What must be exceeded, and by how much the observed gain may be below the true one.
        needed, missed = self.value - np.quantile(self.low_S, [alpha, 1 - power], method="higher")
        if self.signs_decide:
            needed = NormalDist().inv_cdf(1 - alpha) * float(np.hypot(self.items, self.seeds))
        return float(threshold + needed + missed)


def gain_over_seeds(
    runs_a: Sequence[Evidence],
    runs_b: Sequence[Evidence],
    *,
    seed_std: float,
    resamples: int,
    seed: int,
    sign: float = 1.0,
    pooled: tuple[float, int] = (0.0, 0),
) -> Gain | None:
    """Measure the gain of variant a over variant b; None with fewer than two groups.

    Args:
        runs_a, runs_b: the evidence of each run of a variant, all measured on the same groups.
        seed_std: prior standard deviation of a run's value over seeds; 0: unknown.
        sign: -1 if lower is better.
        pooled: of the runs of other variants on this test: the sum of the squared deviations from their variant's mean,
            and its degrees of freedom.

    Raises:
        ValueError: the runs were not measured on the same groups, or a side has none.
    """
    runs = [*runs_a, *runs_b]
    sums = [sum_by_group(run.groups, run.parts_NK) for run in runs]
    if not runs_a or not runs_b or any(groups != sums[0][0] for groups, _ in sums):
        raise ValueError("a gain needs at least one run on each side, all measured on the same groups")
    count = len(sums[0][0])
    if count < 2 or resamples < 1:
        return None

    # Each group's share of each run's value (the jackknife's pseudo-values), and of the gain.
    values_R, shares_RG = _shares(runs, [sums_GK for _, sums_GK in sums])
    sides = [slice(len(runs_a)), slice(len(runs_a), None)]
    weights_R = np.concatenate([np.full(len(runs_a), sign / len(runs_a)), np.full(len(runs_b), -sign / len(runs_b))])
    value, shares_G = float(weights_R @ values_R), weights_R @ shares_RG
    deviations_RG = shares_RG - shares_RG.mean(axis=1, keepdims=True)
    variance = float(((weights_R @ deviations_RG) ** 2).sum()) * count / (count - 1)  # of the sum of the shares

    # The two tests.
    values_C, sizes_C = _cells(shares_G)
    # The sum of the shares, each with a random sign.
    chance_S = np.concatenate([signs_SC @ values_C for signs_SC in _batches(_draw_signs, sizes_C, resamples, seed)])
    (losses_S, low_end_S), (gains_S, high_end_S) = (
        _hidden_losses(side * values_C, sizes_C, float(np.ptp(shares_RG)), resamples, seed) for side in (1.0, -1.0)
    )

    # The second level: without a deviation over seeds, the draws are over items only.
    seeds = 0.0
    # What the runs of a side do differently on an item, as a variance of one run's value; 0 with one run each.
    run_noise = 0.0
    if len(runs) > 2:
        apart_RG = np.concatenate([deviations_RG[side] - deviations_RG[side].mean(axis=0) for side in sides])
        run_noise = float((apart_RG**2).sum()) * count / (count - 1) / (len(runs) - 2)
    deviation, degrees = _deviation([values_R[side] for side in sides], seed_std, run_noise, pooled)
    if deviation is not None:
        both = 1 / len(runs_a) + 1 / len(runs_b)
        seeds = float(np.sqrt(max(0.0, deviation**2 - run_noise) * both))
        # The runs' own noise on the items is in their deviation: the items' draws keep the rest of their variance. No
        # more is taken than the deviation has: totals of two runs may be equal by chance, and their noise is not gone.
        in_both = min(run_noise, deviation**2) * both
        rest = float(np.sqrt(max(0.0, 1 - in_both / variance))) if variance > 0 else 1.0
        noise_S = deviation * np.sqrt(both) * _student(degrees, resamples * SEED_DRAWS, seed)
        chance_S, losses_S, gains_S, low_end_S, high_end_S = (
            np.repeat(rest * part_S, SEED_DRAWS) + noise_S
            for part_S in (chance_S, losses_S, gains_S, low_end_S, high_end_S)
        )
    return Gain(
        value=value,
        chance_S=chance_S,
        low_S=value - losses_S,
        high_S=value + gains_S,
        ends_S=(value - low_end_S, value + high_end_S),
        signs_decide=len(runs) == 2 and _are_right_or_wrong(shares_RG),
        items=float(np.sqrt(variance)),
        seeds=seeds,
        seed_std=deviation,
        runs=(len(runs_a), len(runs_b)),
        groups=count,
        resamples=resamples,
    )


def _shares(runs: Sequence[Evidence], sums: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the runs' values [R], and each group's share of them [R, G]; the shares of a mean add up to it."""
    values, shares = [], []
    for run, sums_GK in zip(runs, sums, strict=True):
        count, total_1K = len(sums_GK), sums_GK.sum(axis=0, keepdims=True)
        value = float(run.statistic(total_1K)[0])
        with np.errstate(divide="ignore", invalid="ignore"):  # a statistic may need the group that is left out
            without_G = run.statistic(total_1K - sums_GK)
        shares_G = (value + (count - 1) * (value - without_G)) / count
        # A statistic that is undefined without a group gives that group the average share.
        shares.append(np.where(np.isfinite(shares_G), shares_G, value / count))
        values.append(value)
    return np.array(values), np.stack(shares)


def _are_right_or_wrong(shares_RG: FloatArray) -> bool:
    """Return whether each group counts either nothing or one and the same share, as one question's answer does."""
    largest = shares_RG.max()
    return bool((np.minimum(np.abs(shares_RG), np.abs(shares_RG - largest)) <= 1e-6 * abs(largest)).all())


def _cells(shares_G: FloatArray) -> tuple[FloatArray, NDArray[np.int64]]:
    """Return the different shares [C] and how many groups have each [C].

    Equal shares may differ by rounding. Of a large test, shares close to each other are replaced by their mean.
    """
    largest = float(np.abs(shares_G).max())
    if len(shares_G) <= CELLS or largest == 0:
        return shares_G, np.ones(len(shares_G), dtype=np.int64)
    for steps in (1e9, CELLS / 2):
        rounded_G = np.round(shares_G / largest * steps)
        _, cell_G, sizes_C = np.unique(rounded_G, return_inverse=True, return_counts=True)
        if len(sizes_C) <= CELLS:
            break
    return np.bincount(cell_G, weights=shares_G) / sizes_C, sizes_C


def _hidden_losses(
    values_C: FloatArray, sizes_C: NDArray[np.int64], score_range: float, resamples: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Draw how far the true gain may be below the sum of the shares [S], by the studentized bootstrap.

    Args:
        values_C, sizes_C: the different shares, and how many groups have each.
        score_range: of the shares of all runs: what a group may lose where none lost anything.

    Returns:
        What decides, with a loss that is worse than those of the sample; and what the interval ends by, with one
        that is as bad.
    """
    count = int(sizes_C.sum())
    mean, largest = float(sizes_C @ values_C) / count, float(np.abs(values_C).max())
    apart_C = values_C - mean
    deviation = float(np.sqrt(sizes_C @ apart_C**2 / count))
    lost_nothing = bool(values_C.min() >= -1e-9 * largest)
    worst, worse = (score_range, 1.0) if lost_nothing else (-float(values_C.min()), 1 + WORSE / np.sqrt(count))
    # Of each draw of G from G + 1: how often it has the one more, and sums of the deviations and of their squares.
    powers_C3 = np.zeros((len(values_C) + 1, 3))
    powers_C3[:-1, 1], powers_C3[:-1, 2], powers_C3[-1, 0] = apart_C, apart_C**2, 1
    sums_S3 = np.concatenate([counts_SC @ powers_C3 for counts_SC in _batches(_draw_counts, sizes_C, resamples, seed)])
    hidden = []
    for factor in (worse, 1.0):
        # The loss that the sample may have missed, from the mean of the sample; no smaller than its largest gain.
        missed = max(float(apart_C.max()), factor * (mean + worst))
        mean_S = (sums_S3[:, 1] - missed * sums_S3[:, 0]) / count
        square_S = (sums_S3[:, 2] + missed**2 * sums_S3[:, 0]) / count
        beyond_S = count * (mean_S + missed / (count + 1))  # from the mean of what was drawn from
        deviation_S = np.sqrt(np.maximum(square_S - mean_S**2, 0))
        # A draw of equal shares has no deviation, and takes the smallest one of the others.
        has_some_S = deviation_S > 1e-6 * max(deviation, 1e-6 * largest)
        smallest = deviation_S[has_some_S].min(initial=np.inf)
        hidden_S = deviation * beyond_S / np.where(has_some_S, deviation_S, smallest)
        # The deviation of a sample without losses shows nothing of them: the missed ones that are drawn count by size.
        hidden.append(np.maximum(hidden_S, missed * sums_S3[:, 0]) if lost_nothing else hidden_S)
    return hidden[0], hidden[1]


# What is drawn depends only on its seed and on the sizes of the cells and the resamples: comparisons on one test share
# it.
Draw = Callable[[NDArray[np.int64], int, np.random.Generator], FloatArray]


def _batches(draw: Draw, sizes_C: NDArray[np.int64], resamples: int, seed: int) -> Iterable[FloatArray]:
    """Yield what `draw` returns: rows [S, C], some of the resamples at a time."""
    # Small draws are cached, since all comparisons on a test share them; large ones would not fit in memory.
    if sizes_C.sum() == len(sizes_C) and len(sizes_C) * resamples <= COUNTS_AT_ONCE:
        yield _cached(draw, len(sizes_C), resamples, seed)
        return
    rng, step = _generator(draw, seed), max(1, COUNTS_AT_ONCE // len(sizes_C))
    for start in range(0, resamples, step):
        yield draw(sizes_C, min(step, resamples - start), rng)


@functools.lru_cache(maxsize=4)
def _cached(draw: Draw, groups: int, resamples: int, seed: int) -> FloatArray:
    return draw(np.ones(groups, dtype=np.int64), resamples, _generator(draw, seed))


def _generator(draw: Draw, seed: int) -> np.random.Generator:
    # Each kind of draw has a stream, numbered after the seed, so signs and counts are independent.
    return np.random.default_rng([seed, 1] if draw is _draw_signs else [seed])


def _draw_counts(sizes_C: NDArray[np.int64], resamples: int, rng: np.random.Generator) -> FloatArray:
    """Draw G of the groups and of one more, and count the cells [S, C + 1]; the last is the one more."""
    count = sizes_C.sum()
    return rng.multinomial(count, np.append(sizes_C, 1) / (count + 1), size=resamples).astype(np.float64)


def _draw_signs(sizes_C: NDArray[np.int64], resamples: int, rng: np.random.Generator) -> FloatArray:
    """Draw a sign for each group, and add them up within each cell [S, C]."""
    plus_SC = rng.binomial(sizes_C, 0.5, size=(resamples, len(sizes_C)))
    signs_SC: FloatArray = (2 * plus_SC - sizes_C).astype(np.float64)
    return signs_SC


@functools.lru_cache(maxsize=2)
def _student(degrees: int, size: int, seed: int) -> FloatArray:
    return np.random.default_rng([seed, 2]).standard_t(degrees, size=size)


def _deviation(
    sides: Sequence[FloatArray], stated: float, run_noise: float, pooled: tuple[float, int]
) -> tuple[float | None, int]:
    """Return the pooled deviation of one run on this test and its degrees of freedom; None if unknown.

    Args:
        sides: the values of each side's runs.
        stated: deviation over seeds, to which the runs' noise on this test's items is added.
        pooled: of other variants, see `gain_over_seeds`.
    """
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides) + pooled[0]
    degrees = sum(len(side) - 1 for side in sides) + pooled[1]
    # The stated deviation counts like `PRIOR_DEGREES` squared deviations of its size, noise on these items included.
    if stated > 0:
        squares, degrees = squares + PRIOR_DEGREES * (stated**2 + run_noise), degrees + PRIOR_DEGREES
    return (float(np.sqrt(squares / degrees)), degrees) if degrees else (None, 0)
