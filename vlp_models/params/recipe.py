"""What a pretraining run learns: objectives, how they mix, and in how many passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, Share


@dataclass(frozen=True, kw_only=True)
class RampParams:
    """The share of masked words that scheduled sampling replaces: from `start` to `end` in `steps` updates."""

    start: Share = 1.0
    end: Share = 1.0
    steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ScheduledSamplingParams:
    """One pass over a batch, or two-pass scheduled sampling (Li et al. 2021, equations 1 to 3)."""

    scheme: Literal["none", "a", "b", "c"] = "none"
    sample: Literal["multinomial", "argmax"] = "multinomial"  # the paper; its code
    ramp: RampParams = field(default_factory=RampParams)  # share of the masked words that are replaced; the paper: all


@dataclass(frozen=True, kw_only=True)
class ObjectiveParams:
    """weight: of its loss. share: of the samples (`sample`), or of the updates, in whole numbers (`alternate`)."""

    weight: NonNegativeFloat = 1.0
    share: NonNegativeFloat = 1.0

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        """`mlm: 1.0` stands for `mlm: {weight: 1.0}`."""
        return {"weight": value}


@dataclass(frozen=True, kw_only=True)
class RecipeParams:
    """mix: `sum` learns every objective from every sample; `sample` draws one for each sample; `alternate` learns one an
    update, in order. reuse_batch: a cycle of `alternate` learns from one batch, not each turn from another.

    contrast_over: whose pairs contrast tells apart, of several micro-batches: those of each, or of the whole update,
    which costs another pass of the encoders without gradients (Gao et al. 2021), and one more of all but the first
    micro-batch, to count what its losses are over."""

    objectives: dict[str, ObjectiveParams]
    mix: Literal["sum", "sample", "alternate"] = "sum"
    contrast_over: Literal["batch", "update"] = "batch"
    mask_probability: Share = 0.15
    reuse_batch: bool = False
