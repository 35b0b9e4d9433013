"""A buffer that follows what batches hold, over several processes and micro-batches: a codebook's counts and sums."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from vlp_models.objectives.ranks import sum_over_ranks


class FollowsUpdates(nn.Module, ABC):
    """Sums that the forward passes add up, and that the module's buffers follow once an update.

    `add` in the forward pass; the training loop calls `update` once after each of the optimiser's updates, on every
    process. So the buffers are what one process would have with the whole batch, and the same everywhere. Nothing is
    gathered in eval mode or without gradients.
    """

    # No buffer: DDP would overwrite it with the first process's.
    _gathered: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """values: of this process's items, summed; of one shape always."""
        if self.training and torch.is_grad_enabled():
            values = values.detach()
            self._gathered = values.clone() if self._gathered is None else self._gathered + values

    @torch.no_grad()
    def update(self) -> None:
        """All processes must call it; not in eval mode, in which all stays as it is."""
        gathered, self._gathered = self._gathered, None
        if self.training:
            self.fold(sum_over_ranks(self.nothing() if gathered is None else gathered))

    @abstractmethod
    def nothing(self) -> Tensor:
        """The sum of no items."""

    @abstractmethod
    def fold(self, total: Tensor) -> None:
        """Moves the buffers. total: what all micro-batches and processes of the update added."""


class MovingAverage(FollowsUpdates):
    """average = decay * average + (1 - decay) * (the sum over all micro-batches and processes of an update)."""

    average: Tensor

    def __init__(self, start: Tensor, *, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("average", start.detach().clone())

    def add(self, values: Tensor) -> None:
        """values: of this process's items, summed; in the shape of the average."""
        super().add(values.to(self.average.dtype))

    def nothing(self) -> Tensor:
        return torch.zeros_like(self.average)

    def fold(self, total: Tensor) -> None:
        self.average.lerp_(total, 1 - self.decay)


def update_moving_averages(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FollowsUpdates):
            module.update()
