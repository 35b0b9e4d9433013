"""How weights are updated: `optimizer` of a pretraining or fine-tuning run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerParams:
    lr: float
    muon_lr: float = 0.0  # of the blocks' matrices, by Muon; 0: AdamW for them, too
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    warmup_fraction: float = 0.1
    schedule: Literal["linear", "cosine", "constant", "steps"] = "linear"
    decay_at: list[float] = field(default_factory=list)  # steps: after which shares of the updates `lr` falls
    decay_by: float = 0.1  # steps: by this factor each time
    clip_norm: float = 1.0
    ema_decay: float = 0.0  # 0: off

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
