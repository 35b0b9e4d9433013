"""Which samples a step sees, and going on exactly where a run stopped.

The batches of an epoch are a function of (seed, epoch): not of the number of processes, which share each batch out,
nor of the number of workers, nor of the random state of the process. A cursor of three integers is all there is to
save.
What chance decides for a sample (how its image is cropped) follows from its `draw`, a function of (seed, epoch, index)
likewise, or of the image instead of the index, where texts share theirs (grouped_order.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.shards.order import EpochOrder
from vlp_models.errors import CheckpointError, DataError


class _Drawing(Dataset[Sample]):
    """Samples with their draws; an index is (index, draw)."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __getitems__(self, pairs: Sequence[tuple[int, int]]) -> list[Sample]:
        indices = [index for index, _ in pairs]
        together = getattr(self.dataset, "__getitems__", None)
        samples = together(indices) if together else [self.dataset[index] for index in indices]
        return [dataclasses.replace(sample, draw=draw) for sample, (_, draw) in zip(samples, pairs, strict=True)]


class _Cursor:
    """What torch's DataLoader takes for a batch sampler: the rest of the current epoch."""

    def __init__(self, order: EpochOrder, draws: bool) -> None:
        self.order = order
        self.draws = draws
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for share in self.order.batches(self.epoch, self.start):
            share = share or [0]  # some sample to make a batch of, whose rows `ResumableLoader` then takes away
            yield [(i, self.order.draw(self.epoch, i)) for i in share] if self.draws else share

    def __len__(self) -> int:
        return self.order.steps


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader that can be saved after any batch and goes on with the next one.

    Each full or broken-off iteration is an epoch; the next `iter` starts the next one. After `load_state_dict` the
    next `iter` goes on within the saved epoch (or starts the one after it, if that was complete). Asking for an
    iterator without taking a batch changes nothing.

    Lightning saves and loads the state by itself. Under several processes pass `rank` and `world_size` here and
    `use_distributed_sampler=False` to the Trainer. `batch_size` is that of all processes together; a process without a
    sample of a batch gets one of no rows (`Batch.none`).
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        *,
        batch_size: int,
        collate: Callable[[list[Sample]], Batch],
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        draws: bool = False,
        make_order: Callable[..., EpochOrder] = EpochOrder,
    ) -> None:
        """
        Args:
            make_order: which batches there are (data/grouped_order.py, data/block_order.py).
            draws: every sample gets a `draw`, another one each epoch: for training, where images are augmented.

        Raises:
            DataError: the dataset is too small for a single batch.
        """
        order = make_order(
            length=len(dataset),  # type: ignore[arg-type]
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        if order.steps == 0:
            raise DataError(
                f"{order.length} samples are too few for a batch of {batch_size}; lower batch_size, or check the split "
                "and `sources`"
            )
        self._cursor = _Cursor(order, draws)
        self._epoch = 0
        self._yielded = 0
        self._continue = True
        super().__init__(
            _Drawing(dataset) if draws else dataset,  # type: ignore[arg-type]
            batch_sampler=self._cursor,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=num_workers,
            # its own, so that starting an epoch draws nothing from the global generator
            generator=torch.Generator(),
        )

    @property
    def order(self) -> EpochOrder:
        return self._cursor.order

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator: nothing happens before the first batch is asked for.
        if self._yielded == len(self) or (self._yielded and not self._continue):
            self._epoch, self._yielded = self._epoch + 1, 0
        self._continue = False
        self._cursor.epoch, self._cursor.start = self._epoch, self._yielded
        self.generator.manual_seed(self.order.seed)
        empty = self._without_rows()
        for batch in super().__iter__():
            self._yielded += 1
            yield batch.none() if empty and self._yielded == len(self) else batch

    def _without_rows(self) -> bool:
        """Whether this rank has no sample of the last batch; of every other it has some."""
        order = self.order
        last = order.length - (order.steps - 1) * order.batch_size
        return not len(order.share(np.arange(min(last, order.batch_size))))

    def state_dict(self) -> dict[str, int]:
        """`batches` of `epoch` have been handed out, of `steps` in all."""
        return {"epoch": self._epoch, "batches": self._yielded, "steps": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the epochs of the saved run had another number of batches.
        """
        if state["steps"] != len(self):
            raise CheckpointError(
                f"the saved run had {state['steps']} batches an epoch, this one has {len(self)}: the data or "
                "batch_size changed, so it can't be continued; start it anew"
            )
        self._epoch, self._yielded, self._continue = int(state["epoch"]), int(state["batches"]), True
