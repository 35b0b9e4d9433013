"""Buffers that follow the training data by moving averages, over micro-batches and processes: a codebook's counts."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from vlp_models.objectives.distributed import sum_over_ranks


class UpdateAccumulator(nn.Module, ABC):
    """Sums that forward passes accumulate, applied to the module's buffers once per optimizer update.

    Call `add` in the forward pass. The training loop calls `update` after each optimizer update, on every process. The
    buffers are then the same on all processes, and the same as in one process with the whole batch. Nothing is
    accumulated in eval mode or without gradients.
    """

    # Not a buffer: DDP would overwrite it with the first process's.
    _accumulated: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add this process's sum over the items of a micro-batch. The shape must always be the same."""
        if self.training and torch.is_grad_enabled():
            values = values.detach()
            self._accumulated = values.clone() if self._accumulated is None else self._accumulated + values

    @torch.no_grad()
    def update(self) -> None:
        """Apply the accumulated sum of all processes, which all must call this. Does nothing in eval mode."""
        accumulated, self._accumulated = self._accumulated, None
        if self.training:
            # A process that added nothing sends zeros, because the sum waits for all processes.
            self.apply_update(sum_over_ranks(self.zero_total() if accumulated is None else accumulated))

    @abstractmethod
    def zero_total(self) -> Tensor:
        """Return the sum over zero items."""

    @abstractmethod
    def apply_update(self, total: Tensor) -> None:
        """Update the buffers. total: the sum over all micro-batches and processes of the optimizer update."""


def update_moving_averages(model: nn.Module) -> None:
    """Apply the accumulated sums of all `UpdateAccumulator` modules. Call it after each optimizer update."""
    for module in model.modules():
        if isinstance(module, UpdateAccumulator):
            module.update()
