"""A DataLoader that can be saved after any batch, and resumes with exactly the next one.

The batches of an epoch are a function of (seed, epoch): not of the number of processes, which share each batch, nor of
the number of workers, nor of the random state of the process. A cursor of three integers is all there is to save. A
sample's random augmentation follows from its `seed`, a function of (seed, epoch, index) as well, or of the image in
place of the index if texts share their image's seed (`GroupedOrder`).

Workers send batches through pipes. torch's own way, shared memory whose descriptors travel over a socket in TMPDIR,
needs a large /dev/shm and a short path; where one is missing, torch drops the batch and the training waits forever.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.shards.order import EpochOrder
from vlp_models.errors import CheckpointError, DataError, ParamsError, VLPError

WORKER_SECONDS = 1800.0  # for a batch of a worker process; as long as torch's processes wait for each other


class _SeededSamples(Dataset[Sample]):
    """Samples with seeds; an index is (index, seed)."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __getitems__(self, pairs: Sequence[tuple[int, int]]) -> list[Sample]:
        # one call for the batch, if the dataset can: streamed images come by the block
        indices = [index for index, _ in pairs]
        get_batch = getattr(self.dataset, "__getitems__", None)
        samples = get_batch(indices) if get_batch else [self.dataset[index] for index in indices]
        return [dataclasses.replace(sample, seed=seed) for sample, (_, seed) in zip(samples, pairs, strict=True)]


class _Cursor:
    """The batch sampler: the rest of the current epoch."""

    def __init__(self, order: EpochOrder, sample_seeds: bool) -> None:
        self.order = order
        self.sample_seeds = sample_seeds
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for share in self.order.batches(self.epoch, self.start):
            share = share or [0]  # any sample: `ResumableLoader` empties the batch
            yield [(i, self.order.sample_seed(self.epoch, i)) for i in share] if self.sample_seeds else share

    def __len__(self) -> int:
        return self.order.steps


def _start_worker(worker: int) -> None:
    """Let a worker process send the memory of tensors as bytes, and the reason if it cannot send a batch."""
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    Queue._on_queue_feeder_error = _send_reason  # type: ignore[attr-defined]  # by default it drops the batch


def _send_reason(queue: Queue[Any], error: Exception, numbered: tuple[int, Any]) -> None:
    number, _ = numbered  # of the batch
    reason = DataError(
        f"a loader process cannot send its batch ({type(error).__name__}: {error}); set `trainer.num_workers: 0`"
    )
    queue.put((number, ExceptionWrapper((DataError, reason, None))))


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Callable[..., Any], tuple[NDArray[np.uint8]]]:
    # A NumPy array over the storage's memory, which is pickled by its bytes.
    return _rebuild_storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _rebuild_storage(content: NDArray[np.uint8]) -> torch.UntypedStorage:
    return torch.from_numpy(content).untyped_storage()


class _LoaderProcesses(_MultiProcessingDataLoaderIter):
    """torch's loader processes; if they cannot start, nothing is printed after the error."""

    def __del__(self) -> None:
        if hasattr(self, "_workers"):  # torch's own would raise, and Python print it
            super().__del__()


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader that can be saved after any batch and resumes with the next one.

    Each complete or interrupted iteration is an epoch; the next `iter` starts the next one. After `load_state_dict` the
    next `iter` resumes the saved epoch (or starts the one after it, if that was complete). Creating an iterator without
    taking a batch changes nothing.

    Lightning saves and loads the state by itself. With several processes pass `rank` and `world_size` here and
    `use_distributed_sampler=False` to the Trainer. `batch_size` is that of all processes together; a process that has
    no sample of a batch gets an empty one (`Batch.empty`).
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
        store_seconds: float = 0,
        sample_seeds: bool = False,
        make_order: Callable[..., EpochOrder] = EpochOrder,
    ) -> None:
        """Make the loader.

        Args:
            make_order: order of the batches (shards/order.py).
            store_seconds: how long a worker waits for a store that does not respond.
            sample_seeds: give every sample a `seed`, a new one each epoch: for training, if images are augmented.

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
        self.order = order
        self.epoch = 0
        self._cursor = _Cursor(order, sample_seeds)
        self._yielded = 0
        self._continue = True
        super().__init__(
            _SeededSamples(dataset) if sample_seeds else dataset,  # type: ignore[arg-type]
            batch_sampler=self._cursor,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=num_workers,
            worker_init_fn=_start_worker,
            timeout=WORKER_SECONDS + store_seconds if num_workers else 0,
            # a separate generator, so that starting an epoch does not advance the global one
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator: nothing happens before the first batch is requested.
        # An epoch that was complete or interrupted is over, unless its state was just loaded.
        if self._yielded == len(self) or (self._yielded and not self._continue):
            self.epoch, self._yielded = self.epoch + 1, 0
        self._continue = False
        # the batch sampler reads these when iteration begins
        self._cursor.epoch, self._cursor.start = self.epoch, self._yielded
        # It draws the workers' base seed only, the same in every epoch.
        self.generator.manual_seed(self.order.seed)
        # this rank may have no sample of the last batch; it has some of every other
        last = self.order.length - (self.order.steps - 1) * self.order.batch_size
        is_last_empty = not len(self.order.share(np.arange(min(last, self.order.batch_size))))
        try:
            batches = super().__iter__()
        except OSError as error:
            raise ParamsError(
                f"params.yaml: `trainer.num_workers: {self.num_workers}`: a loader process cannot start "
                f"({os.strerror(error.errno or 0).lower()}); set it to 0, or raise the machine's limits on processes "
                "and /dev/shm (of a container: `--pids-limit`, `--shm-size`)"
            ) from error
        try:
            for batch in batches:
                self._yielded += 1
                yield batch.empty() if is_last_empty and self._yielded == len(self) else batch
        except VLPError as error:
            if not self.num_workers:
                raise
            # torch puts the worker's traceback into the message: raise it again with the message alone
            name = f"{type(error).__module__}.{type(error).__name__}: "
            raise type(error)(str(error).rpartition(name)[2].strip()) from error

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _LoaderProcesses(self) if self.num_workers else super()._get_iterator()

    def state_dict(self) -> dict[str, int]:
        """Return epoch, batches returned of it, and batches per epoch."""
        return {"epoch": self.epoch, "batches": self._yielded, "steps": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            CheckpointError: the saved run had another number of batches per epoch.
        """
        # another number of batches is another order of samples
        if state["steps"] != len(self):
            raise CheckpointError(
                f"the saved run had {state['steps']} batches per epoch, this one has {len(self)}: the data or "
                "batch_size changed, so the run cannot be resumed; start it from scratch"
            )
        # `_continue`: the next iteration resumes this epoch instead of starting another one.
        self.epoch, self._yielded, self._continue = int(state["epoch"]), int(state["batches"]), True
