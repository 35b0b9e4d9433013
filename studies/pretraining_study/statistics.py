"""Paired comparisons over seeds, and how many seeds a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

POWER = 0.8
_MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Differences of two arms over the seeds that both have.

    mean, deviation  of the differences
    half             half of the 95% interval of the mean (Student's t)
    p                two-sided, of a mean of zero; 1 where all differences are zero
    """

    n: int
    mean: float
    deviation: float
    half: float
    p: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """`first` less `second`, one value a seed each, in the same order.

    Raises:
        ValueError: fewer than two seeds, or not equally many.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"paired values of two seeds at least are needed; found {len(first)} and {len(second)}")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    n, mean, deviation = len(differences), float(differences.mean()), float(differences.std(ddof=1))
    error = deviation / math.sqrt(n)
    if error == 0:
        return Paired(n=n, mean=mean, deviation=0.0, half=0.0, p=1.0 if mean == 0 else 0.0)
    return Paired(
        n=n,
        mean=mean,
        deviation=deviation,
        half=float(stats.t.ppf(0.975, n - 1)) * error,
        p=float(2 * stats.t.sf(abs(mean) / error, n - 1)),
    )


def power(n: int, *, difference: float, deviation: float, alpha: float) -> float:
    """The chance that a two-sided paired t-test of `n` seeds at `alpha` finds `difference`, of whose paired values a
    seed's standard deviation is `deviation`."""
    if n < 2:
        return 0.0
    critical = stats.t.ppf(1 - alpha / 2, n - 1)
    shift = abs(difference) / deviation * math.sqrt(n)
    wrong_side = float(stats.nct.cdf(-critical, n - 1, shift))
    # SciPy returns NaN where it is almost zero.
    return float(stats.nct.sf(critical, n - 1, shift)) + (0.0 if math.isnan(wrong_side) else wrong_side)


def seeds_needed(*, difference: float, deviation: float, alpha: float, wanted: float = POWER) -> int:
    """The fewest seeds with at least `wanted` power.

    Raises:
        ValueError: not even a thousand suffice.
    """
    for n in range(2, _MOST_SEEDS + 1):
        if power(n, difference=difference, deviation=deviation, alpha=alpha) >= wanted:
            return n
    raise ValueError(f"a difference of {difference} at a deviation of {deviation} needs more than {_MOST_SEEDS} seeds")


def detectable(n: int, *, deviation: float, alpha: float, wanted: float = POWER) -> float:
    """The smallest difference that `n` seeds find with `wanted` power."""
    low, high = 0.0, deviation
    while power(n, difference=high, deviation=deviation, alpha=alpha) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        found = power(n, difference=middle, deviation=deviation, alpha=alpha) >= wanted
        low, high = (low, middle) if found else (middle, high)
    return high
