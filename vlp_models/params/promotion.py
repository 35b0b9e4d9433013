"""The gate's section of params.yaml: what a new version has to show before it becomes champion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from vlp_models.errors import ParamsError
from vlp_models.params.ranges import NonNegativeInt, Split


@dataclass(frozen=True, kw_only=True)
class GateParams:
    """One task's gate. Numbers are in the metric's own unit (percent points; CIDEr 1.2 is 120).

    floors: slice -> the worst value allowed there; `all` is the whole test set, others are named as
        `question_type=how many`, `objects=6+`, `caption_length=1-6` (evaluation/slices.py).
    """

    metric: str = ""  # empty: tracking.metric's
    direction: Literal["higher", "lower"] = "higher"
    min_gain: float = 0.0
    confidence: float = 0.95  # share of paired resamples whose gain must exceed min_gain
    floors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ParamsError(f"params.yaml: promotion: `confidence` from 0.5 to below 1, found {self.confidence}")
        if not math.isfinite(self.min_gain) or self.min_gain < 0:
            raise ParamsError(f"params.yaml: promotion: `min_gain` must not be negative, found {self.min_gain}")
        for name, floor in self.floors.items():
            if not math.isfinite(floor):
                raise ParamsError(f"params.yaml: promotion: the floor of `{name}` must be a number, found {floor}")


@dataclass(frozen=True, kw_only=True)
class PromotionParams:
    """`tasks`: a task without an entry has the defaults."""

    ledger: str = "promotions/ledger.jsonl"  # from the project's root
    split: Split = "test"  # what a version is judged on
    choose_on: Split = "val"  # on what the best of several is chosen, where all of them were scored there; else `split`
    resamples: Annotated[int, Field(le=1_000_000)] = 2000
    seed: NonNegativeInt = 1
    allowed_unvalidated: bool = False  # a version whose data has no passed validation on record
    tasks: dict[str, GateParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resamples < 200:
            raise ParamsError(f"params.yaml: `promotion.resamples` must be at least 200, found {self.resamples}")

    def gate(self, task: str) -> GateParams:
        return self.tasks.get(task, GateParams())
