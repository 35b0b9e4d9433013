"""How much a few steps of training on a query lower the loss of each training pair: mirrored influence.

M. Ko, F. Kang, W. Shi, M. Jin, Z. Yu, R. Jia: "The Mirrored Influence Hypothesis: Efficient Data Influence Estimation
by Harnessing Forward Passes", CVPR 2024: what a training pair does to the loss of a query is, but for a factor that all
pairs share, what the query does to the loss of the pair. So the weights are moved a little by training on the query,
and the losses of all pairs are computed before and after: two forward passes, and no gradient of a single pair. The
paper moves against the gradient; here the steps are those of AdamW, and few.

Shape suffixes: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.tasks.base import TaskModel

Losses = Callable[[TaskModel, Batch], Tensor]
STEPS = 60
LR = 0.03  # of a step, relative to the run's learning rate


def trained_weights(task: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that influence is measured in: those that are not frozen."""
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


@contextmanager
def moved_weights(
    task: TaskModel, batches: Callable[[], Iterable[Batch]], losses: Losses, *, lr: float
) -> Iterator[None]:
    """In the block, the weights are those after `STEPS` steps on the mean loss of the batches, again and again.

    Afterwards they are the same as before, bit for bit.
    """
    parameters = trained_weights(task)
    saved = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    endless = chain.from_iterable(batches() for _ in repeat(None))
    try:
        for _, batch in zip(range(STEPS), endless, strict=False):
            optimizer.zero_grad()
            losses(task, batch).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def all_losses(task: TaskModel, batches: Iterable[Batch], losses: Losses) -> NDArray[np.float64]:
    """Return the loss of each pair, [P], in the order of the batches."""
    return np.concatenate([losses(task, batch).double().cpu().numpy() for batch in batches])
