"""Bootstrap: 95% intervals of a metric.

Intervals are percentile intervals over resampled groups (Efron and Tibshirani, 1993, chapter 13). How two variants
compare is in metrics/gain.py.

Shape suffixes: N items, G groups, K additive statistics, S resamples.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vlp_models.metrics.score import Evidence, FloatArray

LEVELS = (2.5, 97.5)
MIN_GROUPS = 20  # with fewer, a 95% interval covers the true value clearly less often than stated (test_bootstrap.py)
NO_INTERVAL = "no 95% interval"  # in the note of a score with fewer
COUNTS_AT_ONCE = 4_000_000  # 32 MB of resampling counts


def interval(evidence: Evidence | None, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """Return the ends of the 95% interval; None with fewer than `MIN_GROUPS` groups."""
    if evidence is None:
        return None
    _, sums_GK = sum_by_group(evidence.groups, evidence.parts_NK)
    if len(sums_GK) < MIN_GROUPS or resamples < 1:
        return None
    # (G, K) -> (S, K) -> (S,): the metric of each resample, and the percentiles between which 95% of them are.
    low, high = np.percentile(evidence.statistic(resample(sums_GK, resamples, seed)), LEVELS)
    return float(low), float(high)


def count_in_note(note: str) -> int | None:
    """Return how many test items a score without an interval was computed on, from its note; None for other scores."""
    match = re.search(rf"{NO_INTERVAL}: (\d+) ", note)
    return int(match[1]) if match else None


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
    # The columns of both sides are next to each other, so one draw of the groups gives the sums of both.
    width = sums_a.shape[1]

    def difference(sums_SK: FloatArray) -> FloatArray:
        return a.statistic(sums_SK[:, :width]) - b.statistic(sums_SK[:, width:])

    return Evidence(groups=names_a, parts_NK=np.hstack([sums_a, sums_b]), statistic=difference)


def sum_by_group(groups: Sequence[str], parts_NK: FloatArray) -> tuple[list[str], FloatArray]:
    """Return the sorted group names and the statistics summed within each group [G, K]."""
    names, rows_N = group_rows(groups)
    return names, sum_rows(parts_NK, rows_N, len(names))


def group_rows(groups: Sequence[str]) -> tuple[list[str], NDArray[np.intp]]:
    """Return the sorted group names, and for each item the number of its group [N]."""
    # Not np.unique: an array of text takes the longest name's memory for every name, and drops NULs at the end.
    labels = list(map(str, groups))
    order = sorted(range(len(labels)), key=labels.__getitem__)
    in_order = [labels[i] for i in order]
    # A group starts where a label differs from the one before it.
    starts_N = np.fromiter(map(operator.ne, in_order, itertools.chain([None], in_order)), dtype=bool, count=len(order))
    rows_N = np.empty(len(order), dtype=np.intp)
    rows_N[order] = np.cumsum(starts_N) - 1
    return list(itertools.compress(in_order, starts_N)), rows_N


def sum_rows(parts_NK: FloatArray, rows_N: NDArray[np.intp], groups: int) -> FloatArray:
    """Return the statistics summed within each group [G, K]."""
    # One pass per column: np.add.at over rows of a table takes several times as long.
    columns = [np.bincount(rows_N, weights=column_N, minlength=groups) for column_N in parts_NK.T]
    return np.stack(columns, axis=1)


def resample(sums_GK: FloatArray, resamples: int, seed: int) -> FloatArray:
    """Return the summed statistics [S, K] of `resamples` draws of G out of G groups with replacement."""
    rng = np.random.default_rng(seed)
    return np.concatenate([counts_SG @ sums_GK for counts_SG in draws(len(sums_GK), resamples, rng)])


def draws(groups: int, resamples: int, rng: np.random.Generator) -> Iterator[FloatArray]:
    """Yield how often each group is drawn [S, G], some of the resamples at a time."""
    # Drawing G of G groups with replacement and counting each is one multinomial draw per resample.
    shares, step = np.full(groups, 1 / groups), max(1, COUNTS_AT_ONCE // groups)
    for start in range(0, resamples, step):
        yield rng.multinomial(groups, shares, size=min(step, resamples - start)).astype(np.float64)
