"""Published scores of training pairs that `vlp influence` does not use, for benchmarks/influence.py.

P. W. Koh, P. Liang: "Understanding Black-box Predictions via Influence Functions", ICML 2017, equation 2: to first
order, leaving out pair z changes the loss of query q by g_q H^-1 g_z / N. With the identity, or with the diagonal of
the empirical Fisher matrix in place of H, H^-1 g_q is one direction v in the space of the weights, and g_z v is the
derivative of the loss of z along it: two forward passes over all pairs, and no gradient of a single pair.

Shape suffixes: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.tasks.base import TaskModel

Weights = list[Tensor]
Losses = Callable[[TaskModel, Batch], Tensor]
DAMPING = 0.1  # added to the Fisher matrix, times the mean of its diagonal
STEP = 1e-3  # length of the step along the direction, relative to the weights' norm


def trained_weights(task: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that influence is measured in: those that are not frozen."""
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


def mean_gradient(task: TaskModel, batches: Iterable[Batch], losses: Losses) -> Weights:
    """Return the gradient of the mean loss over all pairs of the batches."""
    parameters = trained_weights(task)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    count = 0
    for batch in batches:
        loss_B = losses(task, batch)
        count += len(loss_B)
        for value, gradient in zip(total, _gradient(loss_B.sum(), parameters), strict=True):
            value += gradient
    return [value / max(count, 1) for value in total]


def fisher_diagonal(task: TaskModel, batches: Iterable[Batch], losses: Losses) -> Weights:
    """Return the mean of the squared gradient over small batches: a few pairs each, since single ones take longer."""
    parameters = trained_weights(task)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    count = 0
    for batch in batches:
        count += 1
        for value, gradient in zip(total, _gradient(losses(task, batch).mean(), parameters), strict=True):
            value += gradient.square()
    return [value / max(count, 1) for value in total]


def precondition(gradient: Weights, fisher: Weights) -> Weights:
    """Return H^-1 g with the damped diagonal."""
    mean = sum(float(value.sum()) for value in fisher) / max(1, sum(value.numel() for value in fisher))
    damping = max(DAMPING * mean, torch.finfo(torch.float32).tiny)
    return [value / (diagonal + damping) for value, diagonal in zip(gradient, fisher, strict=True)]


@torch.no_grad()
def directional_derivatives(
    task: TaskModel, batches: Callable[[], Iterable[Batch]], direction: Weights, losses: Losses
) -> NDArray[np.float64]:
    """Return the derivative of each pair's loss along a direction, by central differences, [P] in the batches' order.

    The weights are the same afterwards, bit for bit.
    """
    parameters = trained_weights(task)
    saved = [parameter.detach().clone() for parameter in parameters]
    step = STEP * _norm(saved) / (_norm(direction) or 1.0)
    sides = []
    try:
        for sign in (1, -1):
            for parameter, value, move in zip(parameters, saved, direction, strict=True):
                parameter.copy_(value + sign * step * move)
            sides.append(np.concatenate([losses(task, batch).double().cpu().numpy() for batch in batches()]))
    finally:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
    return np.asarray((sides[0] - sides[1]) / (2 * step))


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> Weights:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


def _norm(values: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))
