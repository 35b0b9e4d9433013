"""When a training first saw a picture: the order of samples is a function of seed and epoch, so this is known exactly.

Nothing is trained or read but the shards' index. `Windows` (training/data.py) says which update learns from which
batch; here it is the same arithmetic without the batches.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.order import EpochOrder


class Samples(Protocol):
    """What an epoch has."""

    def __len__(self) -> int: ...
    def samples_of(self, image_ids: Set[str]) -> NDArray[np.int64]: ...


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How a training makes updates of batches.

    count: how many it made. accumulate: batches that one adds up. repeats: of them that learn from the same batches,
    one after the other.
    """

    count: int
    accumulate: int = 1
    repeats: int = 1

    def an_epoch(self, batches: int) -> int:
        windows = batches // self.accumulate if self._drops_rest else math.ceil(batches / self.accumulate)
        return windows * self.repeats

    def learning_from(self, batch: int) -> int:
        """The first update of its epoch that learns from this batch, from 0."""
        return batch // self.accumulate * self.repeats

    @property
    def _drops_rest(self) -> bool:
        return self.repeats > 1 and self.accumulate > 1


@dataclass(frozen=True, kw_only=True)
class Sight:
    """epoch, update: the first that learnt from the picture, from 1; updates before it had not seen it."""

    epoch: int
    update: int


def first_sight(samples: Samples, image_ids: Set[str], order: EpochOrder, updates: Updates) -> Sight | None:
    """None: the training never learnt from any of these images."""
    wanted = samples.samples_of(image_ids)
    per_epoch = updates.an_epoch(order.steps)
    if not len(wanted) or not per_epoch:
        return None
    for epoch in range(math.ceil(updates.count / per_epoch)):
        for number, batch in enumerate(order.batches(epoch)):
            within = updates.learning_from(number)
            update = epoch * per_epoch + within
            if within >= per_epoch or update >= updates.count:
                break  # the rest of an epoch that makes no whole window, or what a run did not come to
            if np.isin(batch, wanted).any():
                return Sight(epoch=epoch + 1, update=update + 1)
    return None
