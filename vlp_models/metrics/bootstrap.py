"""95% percentile intervals by resampling whole groups (Efron and Tibshirani, 1993, chapter 13).

G groups, K additive statistics, S resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vlp_models.metrics.score import Evidence, FloatArray

LEVELS = (2.5, 97.5)
_COUNTS_AT_ONCE = 4_000_000  # 32 MB of resampling counts


def interval(evidence: Evidence | None, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """Low and high end; None with fewer than two groups, of which nothing can be said."""
    if evidence is None:
        return None
    _, sums_GK = sum_by_group(evidence.groups, evidence.parts_NK)
    if len(sums_GK) < 2 or resamples < 1:
        return None
    low, high = np.percentile(evidence.statistic(resample(sums_GK, resamples, seed)), LEVELS)
    return float(low), float(high)


def paired(a: Evidence, b: Evidence) -> Evidence:
    """Evidence of a - b, measured on the same groups: both sides see the same resampled ones.

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
    """Sorted group names and the statistics [G, K] summed within each."""
    names, index = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    sums = np.zeros((len(names), parts_NK.shape[1]))
    np.add.at(sums, index, parts_NK)
    return names.tolist(), sums


def resample(sums_GK: FloatArray, resamples: int, seed: int) -> FloatArray:
    """Statistics [S, K] of `resamples` draws of G groups out of G, with replacement."""
    rng = np.random.default_rng(seed)
    return np.concatenate([counts_SG @ sums_GK for counts_SG in draws(len(sums_GK), resamples, rng)])


def draws(groups: int, resamples: int, rng: np.random.Generator) -> Iterator[FloatArray]:
    """How often each group is drawn [S, G], some of the resamples at a time."""
    shares, step = np.full(groups, 1 / groups), max(1, _COUNTS_AT_ONCE // groups)
    for start in range(0, resamples, step):
        yield rng.multinomial(groups, shares, size=min(step, resamples - start)).astype(np.float64)
