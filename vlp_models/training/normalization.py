"""Normalize losses once over all micro-batches and processes of an update.

Objectives return sums and counts. An update minimizes, over its objectives, the sum of

    weight * (sum of `Loss.sum` over all micro-batches and processes) / (sum of `Loss.count` over them)

so that four micro-batches of 16 on two processes equal one batch of 128, including an epoch's shorter last window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlp_models.objectives.distributed import sum_over_ranks
from vlp_models.objectives.loss import Count, Part, WeightedLosses


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums and counts of a micro-batch over all processes: detached, and equal on each of them."""

    weights: Mapping[str, float]
    losses: Mapping[str, Part]
    parts: Mapping[str, Part]

    @property
    def counts(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(part.count) for name, part in self.losses.items()}


def total_over_ranks(loss: WeightedLosses) -> Totals:
    """Add up sums and counts over all processes in one message; all must name the same losses and parts."""
    losses, parts = loss.losses, dict(sorted(loss.parts.items()))
    pairs = [(item.sum, item.count) for item in losses.values()]
    pairs += [(part.sum, part.count) for part in parts.values()]
    device = pairs[0][0].device
    # Losses, then parts: a row with sum and count for each
    numbers = sum_over_ranks(torch.stack([_as_number(value, device) for pair in pairs for value in pair]))
    totals = [Part(sum=row[0], count=row[1]) for row in numbers.view(-1, 2)]
    return Totals(
        weights=dict(loss.weights),
        losses=dict(zip(losses, totals[: len(losses)], strict=True)),
        parts=dict(zip(parts, totals[len(losses) :], strict=True)),
    )


def sum_counts(counts: Mapping[str, Count], device: torch.device) -> dict[str, Tensor]:
    """Add up the processes' counts by name."""
    if not counts:
        return {}
    summed = sum_over_ranks(torch.stack([_as_number(count, device) for count in counts.values()]))
    return dict(zip(counts, summed, strict=True))


def normalize(weighted: WeightedLosses, counts: Mapping[str, Tensor]) -> Tensor:
    """Return this process's weighted sums divided by the counts of the whole update; differentiable."""
    # Each loss by its own count, over all micro-batches and processes.
    terms = []
    for name, loss in weighted.losses.items():
        factor = weighted.weights[name] / at_least_one(counts[name])
        terms.append(loss.sum * factor.to(loss.sum.dtype))
    return torch.stack(terms).sum()


def mean_losses(window: Sequence[Totals]) -> dict[str, Tensor]:
    """Return the loss and the means of its parts over several micro-batches; a part without any item is left out."""
    # By loss: its sum and count over the window, and its weight. By part: what each micro-batch has of it
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
    loss = torch.stack([weights[name] * sums[name] / at_least_one(counts[name]) for name in sums]).sum()
    means = {"loss": loss}
    for name, parts_of_batches in parts.items():
        count = torch.stack([torch.as_tensor(part.count) for part in parts_of_batches]).sum()
        if count > 0:
            means[name] = torch.stack([part.sum for part in parts_of_batches]).sum() / count
    return means


def at_least_one(count: Tensor) -> Tensor:
    """Return the divisor for a count: a sum over no items stays 0."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _as_number(value: Count, device: torch.device) -> Tensor:
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    return value.to(device, torch.float32 if device.type == "mps" else torch.float64)  # MPS has no float64
