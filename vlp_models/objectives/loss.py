"""What an objective returns: a sum and how many items it is over, not a mean.

Micro-batches and processes hold different numbers of items. A mean of their means would weigh the items of a small one
more. So an objective sums, and the training loop divides once, by the items of all of them (training/normalise.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Count: TypeAlias = int | float | Tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A number worth logging (`mlm`, `mlm_accuracy`, ...), detached: its sum over `count` items of this process."""

    sum: Tensor
    count: Count

    @property
    def mean(self) -> Tensor:
        """Of this process's items; zero if there are none."""
        return _mean(self.sum, self.count)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """An objective on this process's part of a batch.

    sum    differentiable, over the items; zero, but attached to the graph, if there are none
    count  how many items these are (tokens, regions, pairs, ...)
    parts  the numbers worth logging. Every process must name the same ones, also one without items
    """

    sum: Tensor
    count: Count
    parts: Mapping[str, Part]

    @classmethod
    def of(cls, total: Tensor, count: Count, **sums: Tensor) -> Loss:
        """A loss whose parts, given as sums, are over the same items as itself."""
        return cls(
            sum=total,
            count=count,
            parts={name: Part(sum=value.detach(), count=count) for name, value in sums.items()},
        )

    @property
    def mean(self) -> Tensor:
        """What a single process learns from this batch alone; zero if there are no items."""
        return _mean(self.sum, self.count)


@dataclass(frozen=True, kw_only=True)
class WeightedLosses:
    """Several losses, each with items of its own. What is learnt is the sum of weight * sum / count over them."""

    losses: Mapping[str, Loss]
    weights: Mapping[str, float]

    @property
    def mean(self) -> Tensor:
        """What a single process learns from this batch alone."""
        return torch.stack([loss.mean * self.weights[name] for name, loss in self.losses.items()]).sum()

    @property
    def parts(self) -> dict[str, Part]:
        """Of all losses, unweighted."""
        return {name: part for loss in self.losses.values() for name, part in loss.parts.items()}


def _mean(total: Tensor, count: Count) -> Tensor:
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
