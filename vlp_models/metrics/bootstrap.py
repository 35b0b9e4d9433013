"""Bootstrap: 95% intervals of a metric, the gain of one variant over another, and pairwise comparisons of variants.

Intervals are percentile intervals over resampled groups (Efron and Tibshirani, 1993, chapter 13).

`gain_over_seeds` measures a gain with the variation of items and of seeds, in two levels. Groups of items (images) are
drawn with replacement, once for all runs of both sides. Each draw then adds a draw of the seeds' variation: the
difference of two means of k_a and k_b runs whose values deviate by s, from Student's t. s is pooled from the runs of
both sides and from a stated prior deviation, as in Smyth (2004), "Linear models and empirical Bayes": the stated
deviation counts like one measured with `PRIOR_DEGREES` degrees of freedom, so it decides if a side has one run and
fades with many. What runs of one side do differently on an item is in s: the draws of the items are shrunk by that part
of their variance, at most by s, which is 0 for runs with equal totals. With one run per side that part is unknown and
stays (the interval is then slightly wide).

With few items, or few on which the sides differ (two models that are right on 98%), a bootstrap finds gains too easily.
A gain must therefore pass a second test, too: each group's share of the gain gets a random sign (a paired permutation
test; Noreen, 1989, "Computer-intensive methods for testing hypotheses"), which is exact for two sides that differ by
chance only. p is the larger of the two, and the interval has the farther of the two ends. A group's share is its
jackknife pseudo-value, so this holds for any statistic and any number of runs.

`compare_variants` compares all pairs of variants with Holm's correction. Seeds are drawn with replacement, separately
for each variant; groups of items are drawn once for all runs, because the test is the same (the crossed scheme of Owen,
2007, "The pigeonhole bootstrap"). With few seeds, a resampled mean varies too little and its tails are too short, so
its deviation is stretched by sqrt(n / (n - 1)) and by the ratio of Student's t quantile with n_a + n_b - 2 degrees of
freedom to the normal one. Without that, comparisons of two seeds each report noise as a difference in three of ten
cases.

Shape suffixes: G groups, K additive statistics, S resamples, R runs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.metrics.score import Evidence, FloatArray

LEVELS = (2.5, 97.5)
MIN_GROUPS = 20  # with fewer, a 95% interval covers the true value clearly less often than stated (test_bootstrap.py)
NO_INTERVAL = "no 95% interval"  # in the note of a score with fewer
_COUNTS_AT_ONCE = 4_000_000  # 32 MB of resampling counts


def interval(evidence: Evidence | None, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """Return the ends of the 95% interval; None with fewer than `MIN_GROUPS` groups."""
    if evidence is None:
        return None
    _, sums_GK = sum_by_group(evidence.groups, evidence.parts_NK)
    if len(sums_GK) < MIN_GROUPS or resamples < 1:
        return None
    low, high = np.percentile(evidence.statistic(resample(sums_GK, resamples, seed)), LEVELS)
    return float(low), float(high)


def count_in_note(note: str) -> int | None:
    """Return how many test items a score without an interval was computed on, from its note; None for other scores."""
    found = re.search(rf"{NO_INTERVAL}: (\d+) ", note)
    return int(found[1]) if found else None


def explain_few(count: int, split: str) -> str:
    """Return what scores on fewer than `MIN_GROUPS` images are worth."""
    images = "image" if count == 1 else "images"
    return f"Only {count} {split} {images}: these scores show that the pipeline runs, not how good the model is"


def paired(a: Evidence, b: Evidence) -> Evidence:
    """Return the evidence of a - b on the same groups: both sides use the same resampled groups.

    Raises:
        ValueError: the two were not measured on the same groups.
    """
    names_a, sums_a = sum_by_group(a.groups, a.parts_NK)
    names_b, sums_b = sum_by_group(b.groups, b.parts_NK)
    if names_a != names_b:
        raise ValueError("a paired difference needs the same groups on both sides")
    width = sums_a.shape[1]

    def difference(sums_SK: FloatArray) -> FloatArray:
        return a.statistic(sums_SK[:, :width]) - b.statistic(sums_SK[:, width:])

    return Evidence(groups=names_a, parts_NK=np.hstack([sums_a, sums_b]), statistic=difference)


def sum_by_group(groups: Sequence[str], parts_NK: FloatArray) -> tuple[list[str], FloatArray]:
    """Return the sorted group names and the statistics summed within each group [G, K]."""
    # Not np.unique: an array of text takes the longest name's memory for every name, and drops NULs at the end.
    own = [str(group) for group in groups]
    names = sorted(set(own))
    place = {name: i for i, name in enumerate(names)}
    sums = np.zeros((len(names), parts_NK.shape[1]))
    np.add.at(sums, np.array([place[name] for name in own], dtype=np.intp), parts_NK)
    return names, sums


def resample(sums_GK: FloatArray, resamples: int, seed: int) -> FloatArray:
    """Return the summed statistics [S, K] of `resamples` draws of G out of G groups with replacement."""
    rng = np.random.default_rng(seed)
    return np.concatenate([counts_SG @ sums_GK for counts_SG in draws(len(sums_GK), resamples, rng)])


def draws(groups: int, resamples: int, rng: np.random.Generator) -> Iterator[FloatArray]:
    """Yield how often each group is drawn [S, G], some of the resamples at a time."""
    shares, step = np.full(groups, 1 / groups), max(1, _COUNTS_AT_ONCE // groups)
    for start in range(0, resamples, step):
        yield rng.multinomial(groups, shares, size=min(step, resamples - start)).astype(np.float64)


PRIOR_DEGREES = 10  # degrees of freedom of a stated deviation
SEED_DRAWS = 10  # draws of the seeds' variation per resample of the items: smooths the tails at no cost


@dataclass(frozen=True, kw_only=True, eq=False)
class Gain:
    """ours - theirs, in the metric's unit.

    draws_S       bootstrap distribution of the gain
    chance_S      distribution of the gain if the sides differ by chance only: signs of the groups' shares, and seeds
    items, seeds  standard deviation due to items and to seeds
    seed_std      standard deviation of one run over seeds; None if unknown, and the draws are then over items only
    runs          number of runs of each side
    """

    value: float
    draws_S: FloatArray
    chance_S: FloatArray
    items: float
    seeds: float
    seed_std: float | None
    runs: tuple[int, int]
    groups: int

    def p_value(self, threshold: float) -> float:
        """Return the one-sided p-value of gain > threshold, the larger one of the two tests; never 0."""
        excess = self.value - threshold
        by_chance = int((self.chance_S >= excess - 1e-9 * abs(excess)).sum())
        return (max(int((self.draws_S <= threshold).sum()), by_chance) + 1) / (len(self.draws_S) + 1)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the ends of the interval; the gain is beyond each with probability `alpha` at most."""
        low, high = np.quantile(self.draws_S, [alpha, 1 - alpha])
        by_chance = np.quantile(self.chance_S, 1 - alpha)
        ends = min(low, self.value - by_chance), max(high, self.value + by_chance)
        rounding = 1e-9 * max(abs(self.value), abs(by_chance))  # of two equal numbers' difference
        low, high = (0.0 if abs(end) <= rounding else float(end) for end in ends)
        return low, high

    def detectable(self, threshold: float, alpha: float, power: float) -> float:
        """Return the smallest true gain that this test shows to be above `threshold` with probability `power`."""
        # Relative to the value, not to the mean of the draws: Student's t with one degree of freedom has no mean.
        below, missed = np.quantile(self.draws_S - self.value, [alpha, 1 - power])
        return float(threshold + max(-below, np.quantile(self.chance_S, 1 - alpha)) - missed)


def gain_over_seeds(
    ours: Sequence[Evidence],
    theirs: Sequence[Evidence],
    *,
    seed_std: float,
    resamples: int,
    seed: int,
    sign: float = 1.0,
) -> Gain | None:
    """Measure the gain of `ours` over `theirs`; None with fewer than two groups.

    Args:
        ours, theirs: the evidence of each run of a variant, all measured on the same groups.
        seed_std: prior standard deviation of a run's value over seeds; 0: unknown.
        sign: -1 if lower is better.

    Raises:
        ValueError: the runs were not measured on the same groups, or a side has none.
    """
    sums = [sum_by_group(run.groups, run.parts_NK) for run in (*ours, *theirs)]
    if not ours or not theirs or any(groups != sums[0][0] for groups, _ in sums):
        raise ValueError("a gain needs at least one run on each side, all measured on the same groups")
    count, statistics = len(sums[0][0]), [run.statistic for run in (*ours, *theirs)]
    if count < 2 or resamples < 1:
        return None
    ends = np.cumsum([sums_GK.shape[1] for _, sums_GK in sums])[:-1]
    all_GK = np.hstack([sums_GK for _, sums_GK in sums])  # all runs side by side: one matrix product

    def values(summed_SK: FloatArray) -> FloatArray:
        """Return the values of the runs [R, S]."""
        return np.stack([f(own_SK) for f, own_SK in zip(statistics, np.split(summed_SK, ends, axis=1), strict=True)])

    def gains(values_RS: FloatArray) -> FloatArray:
        gain_S: FloatArray = sign * (values_RS[: len(ours)].mean(axis=0) - values_RS[len(ours) :].mean(axis=0))
        return gain_S

    total_1K = all_GK.sum(axis=0, keepdims=True)
    values_R1 = values(total_1K)
    value = float(gains(values_R1)[0])
    batches = _batches(_draw_counts, count, resamples, seed)
    drawn_RS = np.hstack([values(counts_SG @ all_GK) for counts_SG in batches])
    items_S = gains(drawn_RS)
    with np.errstate(divide="ignore", invalid="ignore"):  # a statistic may need the group that is left out
        without_G = gains(values(total_1K - all_GK))
    shares_G = (value + (count - 1) * (value - without_G)) / count  # the jackknife's pseudo-values
    shares_G = np.where(np.isfinite(shares_G), shares_G, value / count)
    chance_S = np.concatenate([signs_SG @ shares_G for signs_SG in _batches(_draw_signs, count, resamples, seed)])
    draws_S, scale, run_noise = items_S, 0.0, _run_noise(drawn_RS, len(ours))
    deviation, degrees = _deviation(values_R1[:, 0], len(ours), seed_std, run_noise)
    if deviation is not None:
        both, variance = 1 / len(ours) + 1 / len(theirs), float(items_S.var())
        scale = deviation * float(np.sqrt(both))
        # The runs' own noise on the items is in their deviation: the items' draws keep the rest of their variance. No
        # more is taken than the deviation has: totals of two runs may be equal by chance, and their noise is not gone.
        in_both = min(run_noise, deviation**2) * both
        rest = float(np.sqrt(max(0.0, 1 - in_both / variance))) if variance > 0 else 1.0
        items_S, chance_S = items_S.mean() + rest * (items_S - items_S.mean()), rest * chance_S
        noise_S = scale * _student(degrees, resamples * SEED_DRAWS, seed)
        draws_S, chance_S = np.repeat(items_S, SEED_DRAWS) + noise_S, np.repeat(chance_S, SEED_DRAWS) + noise_S
    return Gain(
        value=value,
        draws_S=draws_S,
        chance_S=chance_S,
        items=float(items_S.std()),
        seeds=scale,
        seed_std=deviation,
        runs=(len(ours), len(theirs)),
        groups=count,
    )


# What is drawn depends only on its seed and on the numbers of groups and resamples: comparisons on one test share it.
Draw = Callable[[int, int, int], Iterator[FloatArray]]


def _batches(draw: Draw, groups: int, resamples: int, seed: int) -> Iterable[FloatArray]:
    """Return what `draw` yields: rows [S, G], some of the resamples at a time."""
    small = groups * resamples <= _COUNTS_AT_ONCE
    return [_kept(draw, groups, resamples, seed)] if small else draw(groups, resamples, seed)


@functools.lru_cache(maxsize=4)
def _kept(draw: Draw, groups: int, resamples: int, seed: int) -> FloatArray:
    return np.concatenate(list(draw(groups, resamples, seed)))


def _draw_counts(groups: int, resamples: int, seed: int) -> Iterator[FloatArray]:
    return draws(groups, resamples, np.random.default_rng(seed))


def _draw_signs(groups: int, resamples: int, seed: int) -> Iterator[FloatArray]:
    rng, step = np.random.default_rng([seed, 1]), max(1, _COUNTS_AT_ONCE // groups)
    for start in range(0, resamples, step):
        yield rng.choice(np.array([-1.0, 1.0]), size=(min(step, resamples - start), groups))


@functools.lru_cache(maxsize=2)
def _student(degrees: int, size: int, seed: int) -> FloatArray:
    return np.random.default_rng([seed, 2]).standard_t(degrees, size=size)


def _run_noise(drawn_RS: FloatArray, ours: int) -> float:
    """Return the variance over items of one run's deviation from its side's mean; 0 with one run each."""
    own = [side - side.mean(axis=0) for side in (drawn_RS[:ours], drawn_RS[ours:])]
    degrees = len(drawn_RS) - 2
    return sum(float(side.var(axis=1).sum()) for side in own) / degrees if degrees else 0.0


def _deviation(values_R: FloatArray, ours: int, stated: float, run_noise: float) -> tuple[float | None, int]:
    """Return the pooled deviation of one run on this test and its degrees of freedom; None if unknown.

    Args:
        stated: deviation over seeds, to which the runs' noise on this test's items is added.
    """
    sides = (values_R[:ours], values_R[ours:])
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    degrees = len(values_R) - 2
    if stated > 0:
        squares, degrees = squares + PRIOR_DEGREES * (stated**2 + run_noise), degrees + PRIOR_DEGREES
    return (float(np.sqrt(squares / degrees)), degrees) if degrees else (None, 0)


LEVEL = 0.95
# The 97.5% quantile of Student's t by degrees of freedom; from 11 on, by its expansion in 1 / degrees.
_NORMAL = 1.960
_STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """a - b in the metric's unit. low, high and p are None with fewer than `MIN_GROUPS` groups.

    low, high  the 95% interval
    p        two-sided: twice the smaller share of resamples on either side of 0, never below 2 / (resamples + 1)
    p_holm   p with Holm's correction for all pairs compared together
    seeds    of a and of b; if either has 1, the interval is over items only
    """

    a: str
    b: str
    value: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    seeds: tuple[int, int]
    groups: int

    @property
    def includes_seeds(self) -> bool:
        return min(self.seeds) > 1

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0 and the corrected p is below 5%; otherwise the pair is inconclusive."""
        if self.low is None or self.high is None or self.p_holm is None:
            return False
        return not self.low <= 0 <= self.high and self.p_holm < 1 - LEVEL


def compare_variants(variants: Mapping[str, Sequence[Evidence]], *, resamples: int, seed: int) -> list[Difference]:
    """Compare all pairs of variants, in the mapping's order; none is significant with fewer than `MIN_GROUPS` groups.

    Args:
        variants: name -> the evidence of each seed, all measured on the same groups.

    Raises:
        ValueError: the runs were not measured on the same groups, or a variant has no run.
    """
    sums = {name: [sum_by_group(run.groups, run.parts_NK) for run in runs] for name, runs in variants.items()}
    names = [groups for runs in sums.values() for groups, _ in runs]
    if any(groups != names[0] for groups in names) or not all(sums.values()):
        raise ValueError("variants need at least one run each, all measured on the same groups")
    if len(variants) < 2:
        return []
    count = len(names[0])
    drawable = count >= MIN_GROUPS and resamples > 0
    rng = np.random.default_rng(seed)
    values_RS = _resampled(variants, sums, count, resamples, rng) if drawable else {}
    items_S, seeds_S = {}, {}
    for name, own_RS in values_RS.items():
        runs = len(own_RS)
        drawn_RS = rng.integers(runs, size=(runs, resamples))
        items_S[name] = own_RS.mean(axis=0)
        deviation_S = np.take_along_axis(own_RS, drawn_RS, axis=0).mean(axis=0) - items_S[name]
        seeds_S[name] = deviation_S * np.sqrt(runs / max(1, runs - 1))
    points = {name: float(np.mean([_value(run) for run in runs])) for name, runs in variants.items()}
    found = []
    for a, b in itertools.combinations(variants, 2):
        seeds = (len(variants[a]), len(variants[b]))
        low = high = p = None
        if drawable:
            drawn_S = items_S[a] - items_S[b]
            if min(seeds) > 1:
                drawn_S = drawn_S + _stretch(sum(seeds) - 2) * (seeds_S[a] - seeds_S[b])
            low, high, p = _summarize(drawn_S)
        found.append((a, b, points[a] - points[b], low, high, p, seeds))
    corrected = iter(holm([p for *_, p, _ in found if p is not None]))
    return [
        Difference(
            a=a,
            b=b,
            value=value,
            low=low,
            high=high,
            p=p,
            p_holm=None if p is None else next(corrected),
            seeds=seeds,
            groups=count,
        )
        for a, b, value, low, high, p, seeds in found
    ]


def holm(ps: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction (1979), keeping the order.

    Calling every corrected p below alpha a difference keeps the probability of any false one below alpha.
    """
    corrected = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def _resampled(
    variants: Mapping[str, Sequence[Evidence]],
    sums: Mapping[str, Sequence[tuple[list[str], FloatArray]]],
    count: int,
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, FloatArray]:
    """Return variant -> values of its runs [R, S]; all runs use the same draws of groups."""
    chunks: dict[str, list[FloatArray]] = {name: [] for name in variants}
    for counts_SG in draws(count, resamples, rng):
        for name, runs in variants.items():
            own = [run.statistic(counts_SG @ sums_GK) for run, (_, sums_GK) in zip(runs, sums[name], strict=True)]
            chunks[name].append(np.stack(own))
    return {name: np.concatenate(own, axis=1) for name, own in chunks.items()}


def _stretch(degrees: int) -> float:
    quantile = _STUDENT.get(degrees) or _NORMAL + 2.372 / degrees + 2.823 / degrees**2
    return quantile / _NORMAL


def _summarize(values_S: FloatArray) -> tuple[float | None, float | None, float | None]:
    """Return the percentile interval and the two-sided p; None if a resampled value is not finite."""
    if not np.isfinite(values_S).all():
        return None, None, None
    low, high = np.percentile(values_S, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    smaller = min(int((values_S <= 0).sum()), int((values_S >= 0).sum()))
    return float(low), float(high), min(1.0, 2 * (smaller + 1) / (len(values_S) + 1))


def _value(run: Evidence) -> float:
    return float(run.statistic(run.parts_NK.sum(axis=0, keepdims=True))[0])
