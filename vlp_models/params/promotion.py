"""The gate's section of params.yaml: what a new version has to show before it becomes champion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from vlp_models.errors import ParamsError
from vlp_models.params.ranges import NonNegativeInt, Split

# Of a run's value over seeds, and the gain that is worth noticing, by metric, where params.yaml says nothing. The
# deviations, rounded up, are those of twelve seeds of TDEN in benchmarks/results/study-tden.json, pooled over designs.
SEED_STD = {"CIDEr": 3.9, "accuracy": 1.25, "R@1": 1.6}
RELEVANT_GAIN = {"CIDEr": 10.0}
SOME_DEVIATION, SOME_GAIN = 1.25, 3.0  # of another metric


@dataclass(frozen=True, kw_only=True)
class GateParams:
    """One task's gate. Numbers are in the metric's own unit (percent points; CIDEr 1.2 is 120).

    floors: slice -> the worst value allowed there; `all` is the whole test set, others are named as
        `question_type=how many`, `objects=6+`, `caption_length=1-6` (evaluation/slices.py).
    """

    metric: str = ""  # empty: tracking.metric's
    direction: Literal["higher", "lower"] = "higher"
    min_gain: float = 0.0
    confidence: float = 0.95  # share of paired resamples whose gain must exceed min_gain; more where a test has worn
    relevant_gain: float | None = None  # what you would not want to miss; None: `RELEVANT_GAIN`
    seed_std: float | None = None  # of a run's value over seeds; None: `SEED_STD`; 0: only what runs show
    floors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ParamsError(f"params.yaml: promotion: `confidence` from 0.5 to below 1, found {self.confidence}")
        if not math.isfinite(self.min_gain) or self.min_gain < 0:
            raise ParamsError(f"params.yaml: promotion: `min_gain` must not be negative, found {self.min_gain}")
        for name, value in (("relevant_gain", self.relevant_gain), ("seed_std", self.seed_std)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ParamsError(f"params.yaml: promotion: `{name}` must not be negative, found {value}")
        if self.relevant_gain is not None and self.relevant_gain <= self.min_gain:
            raise ParamsError(
                f"params.yaml: promotion: `relevant_gain` {self.relevant_gain} must be above `min_gain` {self.min_gain}"
            )
        for name, floor in self.floors.items():
            if not math.isfinite(floor):
                raise ParamsError(f"params.yaml: promotion: the floor of `{name}` must be a number, found {floor}")

    def deviation(self, metric: str) -> float:
        return SEED_STD.get(metric, SOME_DEVIATION) if self.seed_std is None else self.seed_std

    def relevant(self, metric: str) -> float:
        """The gain that is worth noticing, above `min_gain`."""
        known = RELEVANT_GAIN.get(metric, SOME_GAIN)
        return self.min_gain + known if self.relevant_gain is None else self.relevant_gain


@dataclass(frozen=True, kw_only=True)
class PromotionParams:
    """`tasks`: a task without an entry has the defaults."""

    ledger: str = "promotions/ledger.jsonl"  # from the project's root
    split: Split = "test"  # what a version is judged on
    select_on: Split = "val"  # on what the best of several is chosen, where all of them were scored there; else `split`
    error_budget: float = 0.2  # the chance that a test's decisions, all together, promote what is no better
    spend: float = 0.1  # the share of what is left of it that a decision spends
    resamples: Annotated[int, Field(le=1_000_000)] = 2000
    seed: NonNegativeInt = 1
    allow_unvalidated: bool = False  # a version whose data has no passed validation on record
    tasks: dict[str, GateParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resamples < 200:
            raise ParamsError(f"params.yaml: `promotion.resamples` must be at least 200, found {self.resamples}")
        for name, value in (("error_budget", self.error_budget), ("spend", self.spend)):
            if not 0 < value < 1:
                raise ParamsError(f"params.yaml: `promotion.{name}` lies between 0 and 1, found {value}")

    def gate(self, task: str) -> GateParams:
        return self.tasks.get(task, GateParams())
