"""The contrasts of a study, read from a file that is committed before the runs, and their verdicts.

alpha    of the family of all contrasts; `seeds`: how many the power calculation asked for
first, second  two arms; the difference is the first's figure less the second's
expected       the arm that the paper found better, or that is expected to be
smallest       the smallest difference that matters, in the metric's unit
deviation      of a paired difference, from seeds that are not the study's (the pilot)
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pretraining_study.measure import METRICS
from pretraining_study.statistics import Paired, paired, power, seeds_needed
from vlp_models.metrics.gain import holm

Values = Mapping[str, Mapping[int, Mapping[str, float]]]  # arm -> seed -> metric -> value
SUPPORTED, REVERSED, INCONCLUSIVE = "supported", "reversed", "inconclusive"
NOT_COMPARED = "not compared"  # in place of figures, where the paper has none of the two arms


@dataclass(frozen=True, kw_only=True)
class Contrast:
    question: str
    first: str
    second: str
    metric: str
    expected: str
    smallest: float
    deviation: float
    paper: str  # its figures, or NOT_COMPARED

    @property
    def less_is_better(self) -> bool:
        return METRICS[self.metric][1]


@dataclass(frozen=True, kw_only=True)
class Plan:
    alpha: float
    seeds: int
    contrasts: tuple[Contrast, ...]

    def power_table(self) -> list[tuple[Contrast, int, float]]:
        """(contrast, seeds it needs for 80% power, its power at the plan's seeds), each at the level that Holm's
        correction gives the smallest of all p-values: what is needed at worst."""
        worst = self.alpha / len(self.contrasts)
        return [
            (
                c,
                seeds_needed(difference=c.smallest, deviation=c.deviation, alpha=worst),
                power(self.seeds, difference=c.smallest, deviation=c.deviation, alpha=worst),
            )
            for c in self.contrasts
        ]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """size: of the 95% interval against `Contrast.smallest`."""

    contrast: Contrast
    found: Paired
    adjusted_p: float
    verdict: str
    size: Literal["matters", "may matter", "too small to matter"]


def read_plan(path: Path, arms: Sequence[str]) -> Plan:
    """
    Raises:
        ValueError: a key is unknown or missing, an arm or metric is unknown, or a number can't be.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in fields(Contrast)}
    contrasts = []
    for number, row in enumerate(raw.get("contrast", []), start=1):
        where = f"{path}: contrast {number}"
        if row.keys() != known:
            raise ValueError(
                f"{where}: keys must be {', '.join(sorted(known))}; differs in {sorted(row.keys() ^ known)}"
            )
        contrast = Contrast(**row)
        for arm in (contrast.first, contrast.second):
            if arm not in arms:
                raise ValueError(f"{where}: no arm {arm!r}; there are {', '.join(arms)}")
        if contrast.expected not in (contrast.first, contrast.second):
            raise ValueError(f"{where}: `expected` is neither `first` nor `second`: {contrast.expected!r}")
        if contrast.metric not in METRICS:
            raise ValueError(f"{where}: no metric {contrast.metric!r}; there are {', '.join(METRICS)}")
        if not (contrast.smallest > 0 and contrast.deviation > 0):
            raise ValueError(f"{where}: `smallest` and `deviation` must be above 0")
        contrasts.append(contrast)
    if not contrasts:
        raise ValueError(f"{path}: no [[contrast]]")
    return Plan(alpha=float(raw["alpha"]), seeds=int(raw["seeds"]), contrasts=tuple(contrasts))


def compare(values: Values, first: str, second: str, metric: str) -> Paired:
    """Over the seeds that both arms have."""
    seeds = sorted(values[first].keys() & values[second].keys())
    return paired(*([values[arm][seed][metric] for seed in seeds] for arm in (first, second)))


def judge(plan: Plan, values: Values) -> list[Finding]:
    """A finding for every contrast, in the plan's order; Holm's correction is over all of them.

    Raises:
        ValueError: a contrast has fewer than two seeds.
    """
    compared = [compare(values, c.first, c.second, c.metric) for c in plan.contrasts]
    adjusted = holm([found.p for found in compared])
    return [
        Finding(
            contrast=c,
            found=found,
            adjusted_p=p,
            verdict=verdict(c, found, p, plan.alpha),
            size=size(found, c.smallest),
        )
        for c, found, p in zip(plan.contrasts, compared, adjusted, strict=True)
    ]


def verdict(contrast: Contrast, found: Paired, adjusted_p: float, alpha: float) -> str:
    if adjusted_p >= alpha:
        return INCONCLUSIVE
    first_is_better = (found.mean < 0) == contrast.less_is_better
    return SUPPORTED if first_is_better == (contrast.expected == contrast.first) else REVERSED


def size(found: Paired, smallest: float) -> Any:
    if -smallest < found.low and found.high < smallest:
        return "too small to matter"
    return "matters" if found.low > smallest or found.high < -smallest else "may matter"
