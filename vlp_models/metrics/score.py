"""A metric's value together with what its interval needs.

N items (images, questions, statements), K additive statistics an item, S resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Statistic = Callable[[FloatArray], FloatArray]  # sums [S, K] -> values [S]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Per-item statistics that add up: the metric is `statistic` of their sum over the items.

    groups: the unit of resampling of each item (its image; NLVR: its sentence). Items of one group are not
        independent, so an interval that resampled items would be too narrow.
    parts_NK: float64.
    items: each item's own id, by which two models' scores are paired; empty where an item is a whole group.
    """

    groups: Sequence[str]
    parts_NK: FloatArray
    statistic: Statistic
    items: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """One number. `value` is in percent, and None where it could not be computed; `note` then says why.

    kept: its evidence is kept item by item, so that a gate can compare two models by it (metrics/items.py).
    """

    metric: str
    value: float | None
    n: int
    note: str = ""
    evidence: Evidence | None = None
    kept: bool = True


def not_computed(metric: str, n: int, reason: str) -> Score:
    return Score(metric=metric, value=None, n=n, note=f"not computed: {reason}")


def mean_score(
    metric: str,
    values: Sequence[float] | FloatArray,
    groups: Sequence[str],
    note: str = "",
    *,
    items: Sequence[str] = (),
    kept: bool = True,
) -> Score:
    """The mean of per-item values between 0 and 1, in percent."""
    if len(values) != len(groups):
        raise ValueError(f"{metric}: {len(values)} values, {len(groups)} groups")
    if not len(values):
        return not_computed(metric, 0, "nothing to score")
    parts = np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))])
    evidence = Evidence(groups=groups, parts_NK=parts, statistic=mean_percent, items=items)
    return Score(
        metric=metric,
        value=float(mean_percent(parts.sum(axis=0, keepdims=True))[0]),
        n=len(values),
        note=note,
        evidence=evidence,
        kept=kept,
    )


def mean_percent(sums_SK: FloatArray) -> FloatArray:
    """Columns: sum of values, number of items."""
    return 100 * sums_SK[:, 0] / sums_SK[:, 1]
