"""The section of params.yaml that says which of a run's weights are kept: `snapshots` of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlp_models.params.ranges import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class SnapshotParams:
    """The weights after the `keep` best validations become the run's result: their average, or the best alone.

    keep     0: off, the last weights are the result
    metric   of the validation (`val_loss`, `val_mlm_accuracy`, ...)
    mode     min: lower is better; max: higher is better
    average  false: the best alone
    """

    keep: NonNegativeInt = 0
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    average: bool = True
