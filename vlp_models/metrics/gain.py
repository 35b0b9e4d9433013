"""Is one variant better than another? The gain over items and seeds.

A gain is shown if four tests agree, each at the same error. p is the largest of the four, and the interval has the
farthest of the four ends.

1. Bootstrap. Groups of items (images) are drawn with replacement, once for all runs of both sides.
2. Sign flips. Each group's share of the gain gets a random sign (a paired permutation test; Noreen, 1989,
   "Computer-intensive methods for testing hypotheses"). With few groups, or few on which the sides differ (two models
   that are right on 98%), a bootstrap alone finds gains too easily. The flips are exact where a gain and a loss of the
   same size are equally likely between equals: for right and wrong answers of independent items, and for sides that
   could be swapped.
3. Skewness. Where equals differ by many small wins and few large losses, a sample that misses some of the losses shows
   a gain with a small deviation, and neither 1 nor 2 takes account of it. So the t value of the mean is transformed
   for the skewness of the shares (Hall, 1992, "On the removal of skewness by transformation"). A sample of such shares
   also understates their skewness. The jackknife estimates by how much; `EXTRAPOLATION` times that is added, which
   benchmarks/gate.py has shown to be enough for lognormal losses.
4. Rare losses. A loss that occurs k times among the shares may be more frequent by as much as a Poisson count of k
   allows, and a little larger; one as large as the largest share may have been missed. The gain must outweigh each.

A group's share is its jackknife pseudo-value, so this holds for any statistic and any number of runs.

Seeds are a second level. Each draw also gets a draw of the seeds' variation: the difference of two means of k_a and k_b
runs whose values deviate by s, from Student's t. s is pooled from the runs of both sides and from a stated prior
deviation, as in Smyth (2004), "Linear models and empirical Bayes": the stated deviation counts like one measured with
`PRIOR_DEGREES` degrees of freedom, so it decides if a side has one run and fades with many. What runs of one side do
differently on an item is in s: the draws of the items are shrunk by that part of their variance, at most by s, which is
0 for runs with equal totals. With one run per side that part is unknown and stays (the interval is then slightly wide).

Shape suffixes: G groups, K additive statistics, S draws, R runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vlp_models.metrics.bootstrap import COUNTS_AT_ONCE, draws, sum_by_group
from vlp_models.metrics.score import Evidence, FloatArray

LEVEL = 0.95
PRIOR_DEGREES = 10  # degrees of freedom of a stated deviation
SEED_DRAWS = 10  # draws of the seeds' variation per draw of the items: smooths the tails at no cost
EXTRAPOLATION = 7  # times the skewness that the sample is estimated to miss
RARE = 30  # a loss that occurs more often than this is not rare: the other tests see it
LARGER = 1.25  # an uncounted loss may be larger by this than those that were counted
FULL_RANGE = (1.0, 100.0)  # the largest loss on an item, in shares and in percent


@dataclass(frozen=True, kw_only=True, eq=False)
class Gain:
    """The gain of variant a over variant b, in the metric's unit. Each array has the seeds' variation added.

    bootstrap_S      bootstrap distribution of the gain
    chance_S         distribution of the gain if the sides differ by chance only: random signs of the shares
    low_S, high_S    the gain less, and plus, what skewness and rare losses may hide, at a random level
    items, seeds     standard deviation due to items and to seeds
    seed_std         standard deviation of one run over seeds; None if unknown, and the draws are then over items only
    runs             number of runs of each side
    """

    value: float
    bootstrap_S: FloatArray
    chance_S: FloatArray
    low_S: FloatArray
    high_S: FloatArray
    items: float
    seeds: float
    seed_std: float | None
    runs: tuple[int, int]
    groups: int

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.bootstrap_S).all())

    def p_value(self, threshold: float) -> float:
        """Return the one-sided p-value of gain > threshold, the largest one of the tests; never 0."""
        excess = self.value - threshold
        # Of the draws, those as large as the gain by chance, and those in which the gain is not above the threshold.
        # The tolerance counts a draw that equals the gain but for rounding.
        by_chance = int((self.chance_S >= excess - 1e-9 * abs(excess)).sum())
        below = max(int((self.bootstrap_S <= threshold).sum()), int((self.low_S <= threshold).sum()))
        # The observed gain is itself one of the equally likely outcomes, so both counts are one more and p is never 0.
        return (max(below, by_chance) + 1) / (len(self.bootstrap_S) + 1)

    def two_sided_p(self) -> float:
        """Return twice the smaller p-value of gain > 0 and of gain < 0."""
        # The same test for the other side: everything is mirrored.
        loss = Gain(
            **vars(self)
            | {"value": -self.value, "bootstrap_S": -self.bootstrap_S, "low_S": -self.high_S, "high_S": -self.low_S}
        )
        return min(1.0, 2 * min(self.p_value(0.0), loss.p_value(0.0)))

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the ends of the interval; the gain is beyond each with probability `alpha` at most."""
        by_chance = float(np.quantile(self.chance_S, 1 - alpha))
        # The farthest end of all tests, on each side.
        low = min(np.quantile(self.bootstrap_S, alpha), np.quantile(self.low_S, alpha), self.value - by_chance)
        high = max(
            np.quantile(self.bootstrap_S, 1 - alpha), np.quantile(self.high_S, 1 - alpha), self.value + by_chance
        )
        rounding = 1e-9 * max(abs(self.value), abs(by_chance))  # of two equal numbers' difference
        return (0.0 if abs(low) <= rounding else float(low)), (0.0 if abs(high) <= rounding else float(high))

    def detectable(self, threshold: float, alpha: float, power: float) -> float:
        """Return the smallest true gain that this test shows to be above `threshold` with probability `power`."""
        # Relative to the value, not to the mean of the draws: Student's t with one degree of freedom has no mean.
        low, missed = np.quantile(self.bootstrap_S, [alpha, 1 - power])
        low = min(low, np.quantile(self.low_S, alpha))
        return float(threshold + max(self.value - low, np.quantile(self.chance_S, 1 - alpha)) + self.value - missed)


def gain_over_seeds(
    runs_a: Sequence[Evidence],
    runs_b: Sequence[Evidence],
    *,
    seed_std: float,
    resamples: int,
    seed: int,
    sign: float = 1.0,
) -> Gain | None:
    """Measure the gain of variant a over variant b; None with fewer than two groups.

    Args:
        runs_a, runs_b: the evidence of each run of a variant, all measured on the same groups.
        seed_std: prior standard deviation of a run's value over seeds; 0: unknown.
        sign: -1 if lower is better.

    Raises:
        ValueError: the runs were not measured on the same groups, or a side has none.
    """
    sums = [sum_by_group(run.groups, run.parts_NK) for run in (*runs_a, *runs_b)]
    if not runs_a or not runs_b or any(groups != sums[0][0] for groups, _ in sums):
        raise ValueError("a gain needs at least one run on each side, all measured on the same groups")
    count, statistics = len(sums[0][0]), [run.statistic for run in (*runs_a, *runs_b)]
    if count < 2 or resamples < 1:
        return None
    # Where the columns of each run but the last end in `all_GK`.
    ends = np.cumsum([sums_GK.shape[1] for _, sums_GK in sums])[:-1]
    all_GK = np.hstack([sums_GK for _, sums_GK in sums])  # all runs side by side: one matrix product

    def values(summed_SK: FloatArray) -> FloatArray:
        """Return the values of the runs [R, S]."""
        parts = np.split(summed_SK, ends, axis=1)
        return np.stack([statistic(part_SK) for statistic, part_SK in zip(statistics, parts, strict=True)])

    def gains(values_RS: FloatArray) -> FloatArray:
        gain_S: FloatArray = sign * (values_RS[: len(runs_a)].mean(axis=0) - values_RS[len(runs_a) :].mean(axis=0))
        return gain_S

    # Test 1: the gain on all groups, and on each draw of them.
    total_1K = all_GK.sum(axis=0, keepdims=True)
    values_R1 = values(total_1K)
    value = float(gains(values_R1)[0])
    drawn_RS = np.hstack([values(counts_SG @ all_GK) for counts_SG in _batches(_draw_counts, count, resamples, seed)])
    items_S = gains(drawn_RS)

    # Tests 2 to 4, from each group's share of the gain.
    with np.errstate(divide="ignore", invalid="ignore"):  # a statistic may need the group that is left out
        without_G = gains(values(total_1K - all_GK))
    shares_G = (value + (count - 1) * (value - without_G)) / count  # the jackknife's pseudo-values
    # A statistic that is undefined without a group gives that group the average share.
    shares_G = np.where(np.isfinite(shares_G), shares_G, value / count)
    chance_S = np.concatenate([signs_SG @ shares_G for signs_SG in _batches(_draw_signs, count, resamples, seed)])
    hidden_losses_S = _hidden_losses(shares_G, resamples, seed)
    hidden_gains_S = _hidden_losses(-shares_G, resamples, seed)

    # The second level: without a deviation over seeds, the draws are over items only.
    bootstrap_S, scale, run_noise = items_S, 0.0, _run_noise(drawn_RS, len(runs_a))
    deviation, degrees = _deviation(values_R1[:, 0], len(runs_a), seed_std, run_noise)
    if deviation is not None:
        both, variance = 1 / len(runs_a) + 1 / len(runs_b), float(items_S.var())
        scale = deviation * float(np.sqrt(both))
        # The runs' own noise on the items is in their deviation: the items' draws keep the rest of their variance. No
        # more is taken than the deviation has: totals of two runs may be equal by chance, and their noise is not gone.
        in_both = min(run_noise, deviation**2) * both
        rest = float(np.sqrt(max(0.0, 1 - in_both / variance))) if variance > 0 else 1.0
        items_S = items_S.mean() + rest * (items_S - items_S.mean())
        noise_S = scale * _student(degrees, resamples * SEED_DRAWS, seed)
        bootstrap_S = np.repeat(items_S, SEED_DRAWS) + noise_S
        chance_S, hidden_losses_S, hidden_gains_S = (
            np.repeat(rest * part_S, SEED_DRAWS) + noise_S for part_S in (chance_S, hidden_losses_S, hidden_gains_S)
        )
    return Gain(
        value=value,
        bootstrap_S=bootstrap_S,
        chance_S=chance_S,
        low_S=value - hidden_losses_S,
        high_S=value + hidden_gains_S,
        items=float(items_S.std()),
        seeds=scale,
        seed_std=deviation,
        runs=(len(runs_a), len(runs_b)),
        groups=count,
    )


def _hidden_losses(shares_G: FloatArray, resamples: int, seed: int) -> FloatArray:
    """Draw how far the true gain may be below the sum of the shares [S]: each draw is at a random level."""
    count = len(shares_G)
    levels_S = _student_quantiles(count - 1, resamples, seed)
    deviations_G = shares_G - shares_G.mean()
    error = float(np.sqrt(count / (count - 1) * (deviations_G**2).sum()))  # standard error of the sum
    is_constant = error <= 1e-9 * np.abs(shares_G).sum()
    # Hall's transformation of t, t + c t^2 + c^2 t^3 / 3 + c / 2 with c = skewness / (3 sqrt(G)), solved for t.
    t_S = levels_S
    c = 0.0 if is_constant else _tail_skewness(deviations_G) / (3 * np.sqrt(count))
    # As c goes to 0 the transformation becomes the identity, and the inverse would divide 0 by 0.
    if abs(c) > 1e-6:
        t_S = (np.cbrt(1 + 3 * c * (levels_S - c / 2)) - 1) / c
    # Row k: more losses of one size than the k that were counted, times the size of the k-th largest.
    losses_K = np.sort(np.maximum(-shares_G, 0))[::-1][: RARE - 1]
    largest = float(np.abs(shares_G).max())
    if is_constant and largest > 0:  # an equal gain on all items shows nothing of what a loss may be
        in_shares = abs(shares_G.sum()) <= FULL_RANGE[0] + 1e-9
        largest = (FULL_RANGE[0] if in_shares else FULL_RANGE[1]) / count
    sizes_K1 = np.array([largest, *(LARGER * losses_K)])[:, None]
    unseen_S = (_uncounted(count - 1, resamples, seed)[: len(sizes_K1)] * sizes_K1).max(axis=0)
    # The larger of the two: skewness (test 3) and rare losses (test 4).
    hidden_S: FloatArray = np.maximum(error * t_S, unseen_S)
    return hidden_S


@functools.lru_cache(maxsize=2)
def _student_quantiles(degrees: int, size: int, seed: int) -> FloatArray:
    """Return Student's t at `size` equally spaced levels, in random order (to combine with the draws of the seeds).

    By its expansion in 1 / degrees (Abramowitz and Stegun, 26.7.5), which is within 0.01 from 19 degrees on.
    """
    normal = NormalDist()
    z_S = np.array([normal.inv_cdf((i + 0.5) / size) for i in range(size)])
    first_S = (z_S**3 + z_S) / 4
    second_S = (5 * z_S**5 + 16 * z_S**3 + 3 * z_S) / 96
    t_S: FloatArray = z_S + first_S / degrees + second_S / degrees**2
    return np.random.default_rng([seed, 3]).permutation(t_S)


@functools.lru_cache(maxsize=2)
def _uncounted(degrees: int, resamples: int, seed: int) -> FloatArray:
    """Return how many more than k events may be expected where k were counted [RARE, S], at random levels.

    The limit is a quantile of gamma(k + 1) (Garwood, 1936), by Wilson and Hilferty's approximation.
    """
    levels_S = _student_quantiles(degrees, resamples, seed)
    shape_K1 = np.arange(1.0, RARE + 1)[:, None]
    root_KS = 1 - 1 / (9 * shape_K1) + levels_S / (3 * np.sqrt(shape_K1))
    uncounted_KS: FloatArray = shape_K1 * root_KS**3 - (shape_K1 - 1)
    return uncounted_KS


def _tail_skewness(deviations_G: FloatArray) -> float:
    """Return the skewness of the shares, made more negative by what the sample is estimated to miss of it.

    Args:
        deviations_G: the shares less their mean, not all 0.
    """
    count = len(deviations_G)
    if count < 4:
        return 0.0
    scaled_G = deviations_G / np.sqrt((deviations_G**2).mean())
    skewness = float((scaled_G**3).mean())
    # The skewness without each share in turn, from sums of powers.
    mean_G = -scaled_G / (count - 1)
    square_G = (count - scaled_G**2) / (count - 1)
    cube_G = (count * skewness - scaled_G**3) / (count - 1)
    variance_G = np.maximum(square_G - mean_G**2, 1e-12)
    without_G = (cube_G - 3 * mean_G * square_G + 2 * mean_G**3) / variance_G**1.5
    # The jackknife estimate of the bias, (G - 1) (mean without each share - estimate), with its sign reversed.
    missed = (count - 1) * (skewness - float(without_G.mean()))
    # Only toward negative: the correction never makes the test easier to pass.
    return min(skewness, skewness + EXTRAPOLATION * missed)


# What is drawn depends only on its seed and on the numbers of groups and resamples: comparisons on one test share it.
Draw = Callable[[int, int, int], Iterator[FloatArray]]


def _batches(draw: Draw, groups: int, resamples: int, seed: int) -> Iterable[FloatArray]:
    """Return what `draw` yields: rows [S, G], some of the resamples at a time."""
    # Small draws are cached, since all comparisons on a test share them; large ones would not fit in memory.
    small = groups * resamples <= COUNTS_AT_ONCE
    return [_cached(draw, groups, resamples, seed)] if small else draw(groups, resamples, seed)


@functools.lru_cache(maxsize=4)
def _cached(draw: Draw, groups: int, resamples: int, seed: int) -> FloatArray:
    return np.concatenate(list(draw(groups, resamples, seed)))


def _draw_counts(groups: int, resamples: int, seed: int) -> Iterator[FloatArray]:
    return draws(groups, resamples, np.random.default_rng(seed))


def _draw_signs(groups: int, resamples: int, seed: int) -> Iterator[FloatArray]:
    # Each kind of draw has a stream, numbered after the seed, so signs and counts are independent.
    rng, step = np.random.default_rng([seed, 1]), max(1, COUNTS_AT_ONCE // groups)
    for start in range(0, resamples, step):
        yield rng.choice(np.array([-1.0, 1.0]), size=(min(step, resamples - start), groups))


@functools.lru_cache(maxsize=2)
def _student(degrees: int, size: int, seed: int) -> FloatArray:
    return np.random.default_rng([seed, 2]).standard_t(degrees, size=size)


def _run_noise(drawn_RS: FloatArray, count_a: int) -> float:
    """Return the variance over items of one run's deviation from its side's mean; 0 with one run each."""
    deviations = [side - side.mean(axis=0) for side in (drawn_RS[:count_a], drawn_RS[count_a:])]
    degrees = len(drawn_RS) - 2
    return sum(float(side.var(axis=1).sum()) for side in deviations) / degrees if degrees else 0.0


def _deviation(values_R: FloatArray, count_a: int, stated: float, run_noise: float) -> tuple[float | None, int]:
    """Return the pooled deviation of one run on this test and its degrees of freedom; None if unknown.

    Args:
        stated: deviation over seeds, to which the runs' noise on this test's items is added.
    """
    sides = (values_R[:count_a], values_R[count_a:])
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    degrees = len(values_R) - 2
    # The stated deviation counts like `PRIOR_DEGREES` squared deviations of its size, noise on these items included.
    if stated > 0:
        squares, degrees = squares + PRIOR_DEGREES * (stated**2 + run_noise), degrees + PRIOR_DEGREES
    return (float(np.sqrt(squares / degrees)), degrees) if degrees else (None, 0)
