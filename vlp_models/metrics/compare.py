"""Paired differences between designs, over test items and seeds, with Holm's correction over the pairs.

A design is what stays the same while the seed changes: its runs answer the same test. The bootstrap is hierarchical.
Above, seeds are drawn with replacement, for each design by itself. Below, groups of items (images) are drawn with
replacement, once for all runs: the test is one, so its luck is common to them (the crossed scheme of Owen, 2007,
"The pigeonhole bootstrap"). Drawn from few seeds, a mean varies too little and in too short tails, so its deviation is
stretched: by sqrt(n / (n - 1)), and by what Student's t exceeds the normal quantile with n_a + n_b - 2 degrees of
freedom. Without that, two seeds a design call noise a difference in three cases of ten.

G groups, K additive statistics, S resamples, R runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.metrics.bootstrap import draws, sum_by_group
from vlp_models.metrics.score import Evidence, FloatArray

LEVEL = 0.95
# The 97.5% quantile of Student's t by degrees of freedom; from 11 on, by its expansion in 1 / degrees.
_NORMAL = 1.960
_STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """a - b in the metric's unit. low, high, p: None where fewer than two groups leave nothing to resample.

    low, high  the 95% interval
    p        two-sided: twice the smaller share of resamples on either side of 0, never below 2 / (resamples + 1)
    p_holm   the same, corrected for all pairs that were asked for together
    seeds    of a and of b; where either is 1, the interval is over items alone
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
    def over_seeds(self) -> bool:
        return min(self.seeds) > 1

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves 0 out, and does so after the correction; else one cannot tell."""
        if self.low is None or self.high is None or self.p_holm is None:
            return False
        return not self.low <= 0 <= self.high and self.p_holm < 1 - LEVEL


def differences(designs: Mapping[str, Sequence[Evidence]], *, resamples: int, seed: int) -> list[Difference]:
    """All pairs of designs, in the mapping's order.

    Args:
        designs: name -> the evidence of each of its seeds, all measured on the same groups.

    Raises:
        ValueError: the runs were not measured on the same groups, or a design has none.
    """
    sums = {name: [sum_by_group(run.groups, run.parts_NK) for run in runs] for name, runs in designs.items()}
    names = [groups for runs in sums.values() for groups, _ in runs]
    if any(groups != names[0] for groups in names) or not all(sums.values()):
        raise ValueError("designs are compared on the same groups, with one run or more each")
    if len(designs) < 2:
        return []
    count = len(names[0])
    drawable = count > 1 and resamples > 0
    rng = np.random.default_rng(seed)
    values_RS = _resampled(designs, sums, count, resamples, rng) if drawable else {}
    items_S, seeds_S = {}, {}
    for name, own_RS in values_RS.items():
        runs = len(own_RS)
        drawn_RS = rng.integers(runs, size=(runs, resamples))
        items_S[name] = own_RS.mean(axis=0)
        deviation_S = np.take_along_axis(own_RS, drawn_RS, axis=0).mean(axis=0) - items_S[name]
        seeds_S[name] = deviation_S * np.sqrt(runs / max(1, runs - 1))
    points = {name: float(np.mean([_value(run) for run in runs])) for name, runs in designs.items()}
    found = []
    for a, b in itertools.combinations(designs, 2):
        seeds = (len(designs[a]), len(designs[b]))
        low = high = p = None
        if drawable:
            drawn_S = items_S[a] - items_S[b]
            if min(seeds) > 1:
                drawn_S = drawn_S + _stretch(sum(seeds) - 2) * (seeds_S[a] - seeds_S[b])
            low, high, p = _told(drawn_S)
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
    """Holm's step-down correction (1979), each p where it stood: below alpha, it may be called a difference while the
    chance of any false one among all stays below alpha."""
    corrected = [0.0] * len(ps)
    highest = 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - place) * ps[i]))
        corrected[i] = highest
    return corrected


def _resampled(
    designs: Mapping[str, Sequence[Evidence]],
    sums: Mapping[str, Sequence[tuple[list[str], FloatArray]]],
    count: int,
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, FloatArray]:
    """Design -> values [R, S] of its runs; the same draw of groups for all of them."""
    chunks: dict[str, list[FloatArray]] = {name: [] for name in designs}
    for counts_SG in draws(count, resamples, rng):
        for name, runs in designs.items():
            own = [run.statistic(counts_SG @ sums_GK) for run, (_, sums_GK) in zip(runs, sums[name], strict=True)]
            chunks[name].append(np.stack(own))
    return {name: np.concatenate(several, axis=1) for name, several in chunks.items()}


def _stretch(degrees: int) -> float:
    quantile = _STUDENT.get(degrees) or _NORMAL + 2.372 / degrees + 2.823 / degrees**2
    return quantile / _NORMAL


def _told(values_S: FloatArray) -> tuple[float | None, float | None, float | None]:
    """Ends of the percentile interval and the two-sided p; None where a resample is no number."""
    if not np.isfinite(values_S).all():
        return None, None, None
    low, high = np.percentile(values_S, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    smaller = min(int((values_S <= 0).sum()), int((values_S >= 0).sum()))
    return float(low), float(high), min(1.0, 2 * (smaller + 1) / (len(values_S) + 1))


def _value(run: Evidence) -> float:
    return float(run.statistic(run.parts_NK.sum(axis=0, keepdims=True))[0])
