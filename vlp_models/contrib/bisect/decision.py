"""Is a trial's score lower? The gate's paired test over items and seeds, against half of the drop."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.gain import Gain, gain_over_seeds
from vlp_models.metrics.score import Evidence

ALPHA = 0.05  # error of each decision
DROP_ALPHA = 0.019  # of each look at the drop: 5% in all over four looks (Pocock, 1977)
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class CompareRule:
    """How two sides are compared: the gate's settings.

    sign      -1 if lower values are better
    seed_std  prior standard deviation of a run's value over seeds
    """

    sign: float = 1.0
    seed_std: float = 0.0
    resamples: int = 2000
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """lower: None if the interval has both answers.

    value, low, high  the gain over the good side, negative if worse; its interval has the decision's error at each end
    more_seeds        about how many more seeds a side would decide; None: no number would, the test has too few items
    """

    lower: bool | None
    value: float
    low: float
    high: float
    seeds: tuple[int, int]
    more_seeds: int | None = 0


def decide(
    trial: Sequence[Evidence],
    good: Sequence[Evidence],
    rule: CompareRule,
    *,
    drop: float,
    other_trials: Sequence[Sequence[Evidence]] = (),
    last: bool = False,
) -> Decision:
    """Decide whether the trial lost the drop, rather than nothing: its gain is shown to be below or above -drop / 2.

    Args:
        drop: between the two points, positive.
        other_trials: the runs of other trials; that all trials vary alike over seeds is an assumption.
        last: no more seeds will be tried, so a loss that is smaller than half of the drop counts if it is shown.
    """
    gain = measure_gain(trial, good, rule, other_trials)
    half = -drop / 2
    lower: bool | None = None
    if gain.p_value_below(half) <= ALPHA or (last and gain.p_value_below(0.0) <= ALPHA):
        lower = True
    elif gain.p_value(half) <= ALPHA:
        lower = False
    return describe(gain, lower, drop / 2)


def confirm_drop(
    bad: Sequence[Evidence], good: Sequence[Evidence], rule: CompareRule, *, seen: float, looks: int = 4
) -> Decision:
    """Decide whether the bad side is lower at all: True; or by less than half of the drop that was seen: False.

    Args:
        looks: how often this is decided at most, as seeds are added.
    """
    gain = measure_gain(bad, good, rule, ())
    alpha = DROP_ALPHA if looks <= 4 else ALPHA / looks
    lower: bool | None = None
    if gain.p_value_below(0.0) <= alpha:
        lower = True
    elif gain.p_value(-seen / 2) <= ALPHA:
        lower = False
    return describe(gain, lower, seen / 2, alpha)


def measure_gain(
    trial: Sequence[Evidence], good: Sequence[Evidence], rule: CompareRule, other_trials: Sequence[Sequence[Evidence]]
) -> Gain:
    """
    Raises:
        DataError: too few test items in common.
    """
    trial, good = take_common([*trial], [*good])
    squares, degrees = 0.0, 0
    for runs in other_trials:
        values_R = np.array([value_of(run) for run in runs])
        squares, degrees = squares + float(((values_R - values_R.mean()) ** 2).sum()), degrees + len(runs) - 1
    gain = gain_over_seeds(
        trial,
        good,
        seed_std=rule.seed_std,
        resamples=rule.resamples,
        seed=rule.seed,
        sign=rule.sign,
        pooled=(squares, degrees),
    )
    if gain is None or gain.groups < MIN_GROUPS or not gain.is_finite:
        raise DataError(f"fewer than {MIN_GROUPS} test images in common, or scores that are not finite: no test")
    return gain


def describe(gain: Gain, lower: bool | None, margin: float, alpha: float = ALPHA) -> Decision:
    low, high = gain.interval(alpha)
    more: int | None = 0
    if lower is None:
        more = more_seeds(gain, margin, alpha)
    return Decision(lower=lower, value=gain.value, low=low, high=high, seeds=gain.runs, more_seeds=more)


def more_seeds(gain: Gain, margin: float, alpha: float = ALPHA) -> int | None:
    """Return about how many more seeds a side would decide if the truth is the margin away; None: no number would."""
    needed = margin / (NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(POWER))
    # The variance of the gain: that of the items stays, that of the seeds shrinks with their number.
    deviation, (a, b) = gain.seed_std or 0.0, gain.runs
    items = max(0.0, gain.items**2 + gain.seeds**2 - deviation**2 * (1 / a + 1 / b))
    if needed**2 <= items:
        return None
    return max(1, math.ceil(2 * deviation**2 / (needed**2 - items)) - min(a, b))


def value_of(run: Evidence) -> float:
    # (N, K) -> (1, K) -> (1,)
    return float(run.statistic(run.parts_NK.sum(axis=0, keepdims=True))[0])


def take_common(trial: list[Evidence], good: list[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """Return both sides' evidence on the items that all have: the test set may have changed."""
    runs = [*trial, *good]
    if any(run.parts_NK.shape[1] != runs[0].parts_NK.shape[1] for run in runs):
        raise DataError("the two were scored by different statistics")
    common = set(runs[0].items).intersection(*(run.items for run in runs[1:]))
    if all(len(run.items) == len(common) for run in runs):
        return trial, good

    return [select_items(run, common) for run in trial], [select_items(run, common) for run in good]


def select_items(run: Evidence, items: Set[str]) -> Evidence:
    """Return the evidence of those items alone."""
    rows = [i for i, item in enumerate(run.items) if item in items]
    return Evidence(
        groups=[run.groups[i] for i in rows],
        parts_NK=run.parts_NK[rows],
        statistic=run.statistic,
        items=[run.items[i] for i in rows],
    )
