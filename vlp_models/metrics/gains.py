"""How much better one design is than another on a test, with the luck of the items and the luck of the seeds.

A bootstrap of two levels. Groups of items (images) are drawn with replacement, once for all runs of both sides, as in
metrics/compare.py. Above it, each draw adds a draw of the seeds' luck: the difference of two means of k_a and k_b runs
whose values deviate by s, from Student's t. s is pooled from the runs of both sides and from what was stated before, as
in Smyth (2004), "Linear models and empirical Bayes": a stated deviation counts like one measured with `TRUST` degrees
of freedom, so that it decides where a side has one run and fades where there are many. Values measured on one test hold
the noise of its items, too, which is thus counted twice: the interval is a little wide rather than a little narrow.

G groups, S resamples, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.metrics.bootstrap import draws, sum_by_group
from vlp_models.metrics.score import Evidence, FloatArray

TRUST = 10  # degrees of freedom of a stated deviation
SEED_DRAWS = 10  # of the seeds' luck, for each resample of the items: tails are smoother, and these cost nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class Gain:
    """ours - theirs, in the metric's unit.

    draws_S: what it might as well have been. items, seeds: standard deviations that either brings. runs: of either
    side. seed_deviation: of one run; None where nothing is known of it, so that the draws are over items alone.
    """

    value: float
    draws_S: FloatArray
    items: float
    seeds: float
    seed_deviation: float | None
    runs: tuple[int, int]
    groups: int

    def p_above(self, least: float) -> float:
        """The share of draws at or below `least`, never 0: the chance of error in saying that the gain is above."""
        return (int((self.draws_S <= least).sum()) + 1) / (len(self.draws_S) + 1)

    def interval(self, error: float) -> tuple[float, float]:
        """Ends, each of which the gain is beyond with a chance of `error`."""
        low, high = np.quantile(self.draws_S, [error, 1 - error])
        return float(low), float(high)

    def detectable(self, least: float, error: float, power: float) -> float:
        """The smallest true gain that would be shown to be above `least`, at this error, in `power` of all cases."""
        # About the value, not about the draws' mean: Student's t with one degree of freedom has none.
        below, missed = np.quantile(self.draws_S - self.value, [error, 1 - power])
        return float(least - below - missed)


def gain_over_seeds(
    ours: Sequence[Evidence],
    theirs: Sequence[Evidence],
    *,
    seed_deviation: float,
    resamples: int,
    seed: int,
    sign: float = 1.0,
) -> Gain | None:
    """What the test tells of the gain; None with fewer than two groups, of which nothing can be said.

    Args:
        ours, theirs: the evidence of each run of the design, all measured on the same groups.
        seed_deviation: standard deviation of a run's value over seeds, as far as it is known beforehand; 0: unknown.
        sign: -1 where less is better.

    Raises:
        ValueError: the runs were not measured on the same groups, or a side has none.
    """
    sums = [sum_by_group(run.groups, run.parts_NK) for run in (*ours, *theirs)]
    if not ours or not theirs or any(groups != sums[0][0] for groups, _ in sums):
        raise ValueError("a gain is measured on the same groups on both sides, with one run or more each")
    count, statistics = len(sums[0][0]), [run.statistic for run in (*ours, *theirs)]
    if count < 2 or resamples < 1:
        return None
    values_R = np.array([float(f(s.sum(axis=0, keepdims=True))[0]) for f, (_, s) in zip(statistics, sums, strict=True)])
    rng, chunks = np.random.default_rng(seed), []
    beside_GRK = np.hstack([sums_GK for _, sums_GK in sums])  # all runs in one product
    ends = np.cumsum([sums_GK.shape[1] for _, sums_GK in sums])[:-1]
    for counts_SG in draws(count, resamples, rng):
        drawn = np.split(counts_SG @ beside_GRK, ends, axis=1)
        several = [f(sums_SK) for f, sums_SK in zip(statistics, drawn, strict=True)]
        chunks.append(_difference(np.stack(several), len(ours)))
    items_S = sign * np.concatenate(chunks)
    deviation, degrees = _deviation(values_R, len(ours), seed_deviation)
    draws_S, scale = items_S, 0.0
    if deviation is not None:
        scale = deviation * float(np.sqrt(1 / len(ours) + 1 / len(theirs)))
        repeated_S: FloatArray = np.repeat(items_S, SEED_DRAWS)
        draws_S = repeated_S + scale * rng.standard_t(degrees, size=len(repeated_S))
    return Gain(
        value=sign * float(_difference(values_R[:, None], len(ours))[0]),
        draws_S=draws_S,
        items=float(items_S.std()),
        seeds=scale,
        seed_deviation=deviation,
        runs=(len(ours), len(theirs)),
        groups=count,
    )


def _difference(values_RS: FloatArray, ours: int) -> FloatArray:
    difference: FloatArray = values_RS[:ours].mean(axis=0) - values_RS[ours:].mean(axis=0)
    return difference


def _deviation(values_R: FloatArray, ours: int, stated: float) -> tuple[float | None, int]:
    """The deviation of one run over seeds, pooled, and its degrees of freedom; None: nothing is known of it."""
    sides = (values_R[:ours], values_R[ours:])
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    degrees = len(values_R) - 2
    if stated > 0:
        squares, degrees = squares + TRUST * stated**2, degrees + TRUST
    return (float(np.sqrt(squares / degrees)), degrees) if degrees else (None, 0)
