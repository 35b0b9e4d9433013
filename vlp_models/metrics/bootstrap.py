"""95% percentile intervals by resampling whole groups (Efron and Tibshirani, 1993, chapter 13).

G groups, K additive statistics, S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlp_models.metrics.score import Evidence, FloatArray

LEVELS = (2.5, 97.5)
_WEIGHTS_AT_ONCE = 8_000_000  # 64 MB of resampling counts


def interval(evidence: Evidence | None, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """Low and high end; None with fewer than two groups, of which nothing can be said."""
    if evidence is None:
        return None
    _, sums_GK = sum_by_group(evidence.groups, evidence.parts_NK)
    if len(sums_GK) < 2 or resamples < 1:
        return None
    low, high = np.percentile(evidence.statistic(resample(sums_GK, resamples, seed)), LEVELS)
    return float(low), float(high)


def gain(
    evidence: Evidence, *, above: float, confidence: float, resamples: int, seed: int
) -> tuple[float, float, float] | None:
    """What resampling says of a (paired) difference; None with fewer than two groups.

    Returns:
        The share of resamples that exceed `above`, and the ends of the interval that holds `confidence` of them
        above its low and as many below its high end (each end is one-sided).
    """
    _, sums_GK = sum_by_group(evidence.groups, evidence.parts_NK)
    if len(sums_GK) < 2 or resamples < 1:
        return None
    values = evidence.statistic(resample(sums_GK, resamples, seed))
    low, high = np.percentile(values, [100 * (1 - confidence), 100 * confidence])
    return float(np.mean(values > above)), float(low), float(high)


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
    count = len(sums_GK)
    rng = np.random.default_rng(seed)
    step = max(1, _WEIGHTS_AT_ONCE // count)
    shares = np.full(count, 1 / count)
    chunks = [
        rng.multinomial(count, shares, size=min(step, resamples - start)) @ sums_GK
        for start in range(0, resamples, step)
    ]
    return np.concatenate(chunks)
