"""One division for all micro-batches and processes: what turns the objectives' sums into what an update learns.

An update learns, over its objectives, the sum of

    weight * (sum over all micro-batches and processes of `Loss.sum`) / (sum over them of `Loss.count`)

so that four micro-batches of 16 on two processes are one batch of 128, an epoch's short last window included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlp_models.objectives.loss import Count, Loss, Part, WeightedLosses
from vlp_models.objectives.ranks import sum_over_ranks

ONLY = ""  # the name of a loss that is the only one


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all processes together hold of a micro-batch: detached, and the same on each of them."""

    weights: Mapping[str, float]
    losses: Mapping[str, Part]
    parts: Mapping[str, Part]

    @property
    def counts(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(part.count) for name, part in self.losses.items()}


def by_name(loss: Loss | WeightedLosses) -> Mapping[str, Loss]:
    return loss.losses if isinstance(loss, WeightedLosses) else {ONLY: loss}


def weights_of(loss: Loss | WeightedLosses) -> Mapping[str, float]:
    return loss.weights if isinstance(loss, WeightedLosses) else {ONLY: 1.0}


def totals(loss: Loss | WeightedLosses) -> Totals:
    """Of all processes, which must name the same losses and parts; one message among them."""
    losses = by_name(loss)
    pairs = [(one.sum, one.count) for one in losses.values()]
    parts = sorted(loss.parts.items())
    pairs += [(part.sum, part.count) for _, part in parts]
    device = pairs[0][0].device
    numbers_N2 = sum_over_ranks(torch.stack([_number(value, device) for pair in pairs for value in pair])).view(-1, 2)
    found = [Part(sum=row[0], count=row[1]) for row in numbers_N2]
    return Totals(
        weights=dict(weights_of(loss)),
        losses=dict(zip(losses, found, strict=False)),
        parts=dict(zip((name for name, _ in parts), found[len(losses) :], strict=True)),
    )


def counts_over_ranks(counts: Mapping[str, Count], device: torch.device) -> dict[str, Tensor]:
    """The processes' counts added up, name by name."""
    if not counts:
        return {}
    summed = sum_over_ranks(torch.stack([_number(count, device) for count in counts.values()]))
    return dict(zip(counts, summed, strict=True))


def divided(loss: Loss | WeightedLosses, counts: Mapping[str, Tensor]) -> Tensor:
    """Differentiable: this process's sums, weighed, over the counts of all that the update adds up."""
    weights = weights_of(loss)
    terms = [one.sum * (weights[name] / or_one(counts[name])).to(one.sum.dtype) for name, one in by_name(loss).items()]
    return torch.stack(terms).sum()


def means(window: Sequence[Totals]) -> dict[str, Tensor]:
    """The loss, and the parts, of several micro-batches together. A part without a single item has no mean."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    parts: dict[str, list[Part]] = {}
    weights: dict[str, float] = {}
    for micro_batch in window:
        weights |= micro_batch.weights
        for name, part in micro_batch.losses.items():
            sums[name] = sums.get(name, 0) + part.sum
            counts[name] = counts.get(name, 0) + torch.as_tensor(part.count)
        for name, part in micro_batch.parts.items():
            parts.setdefault(name, []).append(part)
    loss = torch.stack([weights[name] * sums[name] / or_one(counts[name]) for name in sums]).sum()
    found = {"loss": loss}
    for name, several in parts.items():
        count = torch.stack([torch.as_tensor(part.count) for part in several]).sum()
        if count > 0:
            found[name] = torch.stack([part.sum for part in several]).sum() / count
    return found


def or_one(count: Tensor) -> Tensor:
    """What to divide by: nothing of no items is nothing."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _number(value: Count, device: torch.device) -> Tensor:
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    return value.to(device, torch.float32 if device.type == "mps" else torch.float64)  # MPS has no float64
