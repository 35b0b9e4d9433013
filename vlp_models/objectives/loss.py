"""What an objective returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A differentiable scalar, and the named, detached numbers worth logging (`mlm`, `mlm_accuracy`, ...).

    Over several processes the mean of `total` is the whole batch's loss; `parts` are the whole batch's on each of them.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
