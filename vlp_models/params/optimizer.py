"""How weights are updated: `optimizer` of a pretraining or fine-tuning run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, Share

Kind = Literal["adamw", "adam", "sgd", "muon"]


@dataclass(frozen=True, kw_only=True)
class GroupParams:
    """What a part of the model has of its own; what is null is as in the run's `optimizer`.

    muon: for the group's matrices; its other parameters have AdamW with the run's `lr`.
    frozen: never updated, its statistics neither. frozen_epochs: not in the first epochs.
    """

    kind: Kind | None = None
    lr: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    momentum: Share | None = None  # sgd: 0.9, muon: 0.95
    frozen: bool = False
    frozen_epochs: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerParams:
    """groups: name -> what is different there; a model's names are those of its parts (training/optim.py)."""

    lr: NonNegativeFloat
    kind: Literal["adamw", "adam"] = "adamw"
    muon_lr: NonNegativeFloat = 0.0  # of the blocks' matrices, by Muon; 0: AdamW for them, too
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where the hardware multiplies in it
    weight_decay: NonNegativeFloat = 0.01
    betas: list[Share] = field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveFloat = 1e-8
    warmup_fraction: Share = 0.1
    schedule: Literal["linear", "cosine", "constant", "steps", "inverse_sqrt"] = "linear"
    decay_at: list[float] = field(default_factory=list)  # steps: after which shares of the updates `lr` falls
    decay_by: float = 0.1  # steps: by this factor each time
    min_lr: NonNegativeFloat = 0.0  # `lr` does not fall below it after warm-up; other rates in proportion
    clip_norm: NonNegativeFloat = 1.0  # 0: off
    ema_decay: Share = 0.0  # 0: off
    groups: dict[str, GroupParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule == "steps" and not self.decay_at:
            raise ValueError("`schedule: steps` needs `decay_at`, the shares of all updates after which `lr` falls")
        if self.schedule != "steps" and self.decay_at:
            raise ValueError(f"`decay_at` is for `schedule: steps`, not {self.schedule}; drop it (`decay_at: null`)")
        places = [self.warmup_fraction, *self.decay_at, 1.0] if self.decay_at else []
        if not all(before < after for before, after in itertools.pairwise(places)):
            raise ValueError(
                f"`decay_at: {self.decay_at}` must rise from above `warmup_fraction` ({self.warmup_fraction}) to below "
                "1: shares of all updates, not epochs"
            )
        if not 0 < self.decay_by < 1:
            raise ValueError(f"`decay_by: {self.decay_by}` must lie between 0 and 1")
        if self.lr and self.min_lr > self.lr:
            raise ValueError(f"`min_lr: {self.min_lr}` is above `lr: {self.lr}`")
        if len(self.betas) != 2:
            raise ValueError(f"`betas: {self.betas}` must be two")
