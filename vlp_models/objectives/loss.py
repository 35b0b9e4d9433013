"""The result of an objective, the samples that train it, and the two cross-entropies that most objectives are.

An objective returns a sum and an item count, not a mean. Micro-batches and processes hold different numbers of items,
so a mean of means would give the items of a small batch too much weight. The training loop divides once, by the item
count over all micro-batches and processes (training/normalization.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Count: TypeAlias = int | float | Tensor
Learners: TypeAlias = Mapping[str, Tensor | None]  # objective -> bool [N], the samples that train it; None: all


@dataclass(frozen=True, kw_only=True)
class Part:
    """A detached number to log (`mlm`, `mlm_accuracy`, ...): its sum over `count` items of this process."""

    sum: Tensor
    count: Count

    @property
    def mean(self) -> Tensor:
        """Return the mean over this process's items, or zero if there are none."""
        return _mean(self.sum, self.count)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """An objective on this process's part of a batch.

    sum    differentiable, over the items; zero but still attached to the graph if there are no items
    count  number of items (tokens, regions, pairs, ...)
    parts  numbers to log. All processes must return the same names, including processes without items
    """

    sum: Tensor
    count: Count
    parts: Mapping[str, Part]

    @classmethod
    def of(cls, total: Tensor, count: Count, **sums: Tensor) -> Loss:
        """Return a loss whose parts, given as sums, are over the same items as the loss itself."""
        return cls(
            sum=total,
            count=count,
            parts={name: Part(sum=value.detach(), count=count) for name, value in sums.items()},
        )

    @property
    def mean(self) -> Tensor:
        """Return the loss of a single process on this batch alone; zero if there are no items."""
        return _mean(self.sum, self.count)


@dataclass(frozen=True, kw_only=True)
class WeightedLosses:
    """Several losses, each over its own items. The training loss is the sum of weight * sum / count."""

    losses: Mapping[str, Loss]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, loss: Loss) -> WeightedLosses:
        """Return a single loss, which needs no name, with the weight 1."""
        return cls(losses={"": loss}, weights={"": 1.0})

    @property
    def mean(self) -> Tensor:
        """Return the training loss of a single process on this batch alone."""
        return torch.stack([loss.mean * self.weights[name] for name, loss in self.losses.items()]).sum()

    @property
    def parts(self) -> dict[str, Part]:
        """Return the unweighted parts of all losses."""
        return {name: part for loss in self.losses.values() for name, part in loss.parts.items()}


def _mean(total: Tensor, count: Count) -> Tensor:
    # Without items the sum is zero; dividing it by one keeps it zero, where 0 / 0 is NaN.
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def at_least_float32(values: Tensor) -> Tensor:
    """Return `values` in float32 if they are in half precision, else unchanged."""
    return values.float() if values.dtype.itemsize < 4 else values


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, name: str, label_smoothing: float = 0.0) -> Loss:
    """Return the cross-entropy of N tokens or samples over V words or labels, summed, in float32 at least.

    logits_NV [N, V]; targets_N int64 [N]. With N = 0 the sum is zero but attached to the graph. Parts: `<name>` and
    `<name>_accuracy`.
    """
    logits_NV = at_least_float32(logits_NV)
    total = F.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits_NV.argmax(-1) == targets_N).sum()
    return Loss.of(total, len(targets_N), **{name: total, f"{name}_accuracy": correct})


def soft_label_answers(logits_BA: Tensor, scores_BA: Tensor) -> Loss:
    """Return VQA's loss: multi-label classification over the frequent answers (Anderson et al. 2018).

    Binary cross-entropy with soft scores from 0 to 1, summed over A answers and B questions. `vqa_accuracy` is the mean
    soft score of the most probable answer.
    """
    logits_BA = at_least_float32(logits_BA)
    scores_BA = scores_BA.to(logits_BA.dtype)
    total = F.binary_cross_entropy_with_logits(logits_BA, scores_BA, reduction="sum")
    # (B, A) -> (B, 1) -> the sum of the soft scores of the most probable answers
    scored = scores_BA.gather(1, logits_BA.argmax(1, keepdim=True)).sum()
    return Loss.of(total, len(logits_BA), vqa=total, vqa_accuracy=scored)


def zero_loss(outputs: Tensor, name: str) -> Loss:
    """Return a zero loss of zero items with zero gradients, so that data-parallel replicas stay in agreement.

    Only for batches without items on any process: the loss has no accuracy part, and all processes must return the
    same parts.
    """
    # Not a constant: a process without gradients would leave the others waiting in the all-reduce.
    total = outputs.sum() * 0.0
    return Loss.of(total, 0, **{name: total})


def first_trainable(module: nn.Module) -> Tensor:
    """Return a parameter that requires gradients, for `zero_loss`; the first parameter if all are frozen."""
    return next((weight for weight in module.parameters() if weight.requires_grad), next(module.parameters()))


def select_learners(places: Tensor, learners: Tensor | None) -> Tensor:
    """Return the places, [N, ...] bool, of the samples that train an objective."""
    return places if learners is None else places & learners[:, None]


def learners_by_text(objectives: Learners, owner_N: Tensor | None) -> Learners:
    """Return the learners as texts, bool [N], also where a sample is an image with several texts, bool [B].

    owner_N: each text's image; None: each sample is one text.
    """
    if owner_N is None:
        return objectives
    by_text: dict[str, Tensor | None] = {}
    for name, mask in objectives.items():
        by_text[name] = mask if mask is None or len(mask) == len(owner_N) else mask[owner_N]
    return by_text


def any_learner(objectives: Learners, names: Sequence[str], like_NT: Tensor) -> Tensor:
    """Return which samples train one of these objectives: bool, broadcastable to [N, T]."""
    masks = [objectives[name] for name in names if name in objectives]
    # An objective that all samples train decides alone.
    if any(mask is None for mask in masks):
        return torch.ones_like(like_NT[:1, :1])
    # (objectives, N) -> (N, 1)
    return torch.stack([mask for mask in masks if mask is not None]).any(0)[:, None]
