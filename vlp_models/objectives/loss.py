"""What an objective returns: a sum and how many items it is over, not a mean.

Micro-batches and processes hold different numbers of items. A mean of their means would weigh the items of a small one
more. So an objective sums, and the training loop divides once, by the items of all of them (training/normalization.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, name: str, label_smoothing: float = 0.0) -> Loss:
    """Summed over the N tokens, in float32 at least; zero, but attached to the graph, if there are none."""
    logits_NV = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    total = F.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits_NV.argmax(-1) == targets_N).sum()
    return Loss.of(total, len(targets_N), **{name: total, f"{name}_accuracy": correct})


def empty(outputs: Tensor, name: str) -> Loss:
    """Nothing to learn from: zero of no items, with zero gradients (so that data-parallel replicas still agree).

    Only where all processes have nothing: it names no accuracy, and all must name the same parts.
    """
    total = outputs.sum() * 0.0
    return Loss.of(total, 0, **{name: total})


def trainable(module: nn.Module) -> Tensor:
    """A parameter that learns, for `empty`: a loss of what is frozen has no gradient at all."""
    return next((weight for weight in module.parameters() if weight.requires_grad), next(module.parameters()))


def soft_label_answers(logits_BA: Tensor, scores_BA: Tensor) -> Loss:
    """Binary cross-entropy with the soft scores (0 to 1), summed over answers and questions.

    `vqa_accuracy`: the mean soft score of the most probable answer.
    """
    logits_BA = logits_BA.float() if logits_BA.dtype.itemsize < 4 else logits_BA
    scores_BA = scores_BA.to(logits_BA.dtype)
    total = F.binary_cross_entropy_with_logits(logits_BA, scores_BA, reduction="sum")
    scored = scores_BA.gather(1, logits_BA.argmax(1, keepdim=True)).sum()
    return Loss.of(total, len(logits_BA), vqa=total, vqa_accuracy=scored)
