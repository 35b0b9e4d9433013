"""The batches of a run: shuffled shards of the train split, a fixed part of the val split, and accumulation windows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.order import choose_order
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import StreamParams

MAX_VALIDATION_SAMPLES = 1000


def validation_samples(length: int) -> list[int]:
    """Return the validation samples: indices spread evenly over the split, so that every dataset is represented."""
    return list(np.linspace(0, max(0, length - 1), min(length, MAX_VALIDATION_SAMPLES)).astype(int).tolist())


@dataclass
class LoaderFactory:
    """What a training reads; called with (rank, world size), it returns the train and val loaders of a process.

    view               which samples of `shards` (data/views)
    sources            dataset -> repeats per epoch; empty: every dataset once
    batch_size         samples of all processes together
    captioned          of the view `images`: only those with a reference caption
    regions, pixels    what to read of the images (`InputReader.flags`)
    augment            adds generated captions to the train split's samples (`augmented` in data/shards). None: none
    stream             where and how images are read; without an address: one by one from `shards`
    texts_per_image    up to this many texts on one image are put in the same batch (data/shards/order.py)

    `train` and `val` are the samples of an epoch and of a validation.

    Raises:
        DataError: the shards are damaged, or have no such samples.
        ParamsError: `sources` names a dataset that the shards do not have, or `texts_per_image` is used with a stream.
    """

    shards: Path
    view: str
    _: KW_ONLY
    sources: Mapping[str, int]
    collate: Callable[[list[Sample]], Batch]
    batch_size: int
    seed: int
    num_workers: int = 0
    captioned: bool = False
    regions: bool = True
    pixels: bool = False
    augment: Callable[[ShardDataset], Any] | None = None
    stream: StreamParams | None = None
    texts_per_image: int = 1

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"captioned": self.captioned, "regions": self.regions, "pixels": self.pixels}
        options["stream"] = self.stream
        train = ShardDataset(self.shards, "train", self.view, self.sources, **options)
        if not len(train):
            raise DataError(
                f"{self.shards}: no {self.view} in the train split; check `data` and `sources` in params.yaml"
            )
        self.train = train if self.augment is None else self.augment(train)
        val = ShardDataset(self.shards, "val", self.view, self.sources, **options, by_block=False)
        self.val = Subset(val, validation_samples(len(val)))
        # How an epoch is shuffled: freely, in blocks of a stream, or with texts of an image next to each other
        self._order = choose_order(self.train, self.stream, self.texts_per_image)

    def __call__(self, rank: int, world_size: int) -> tuple[ResumableLoader, ResumableLoader | None]:
        """Return the train loader, and the val loader if the val split has samples.

        Raises:
            ParamsError: the processes can't split a batch evenly.
        """
        if self.batch_size % world_size:
            nearest = max(1, round(self.batch_size / world_size)) * world_size
            raise ParamsError(
                f"params.yaml: `batch_size: {self.batch_size}` is the global batch size and must be divisible by the "
                f"{world_size} processes (`trainer.devices` times `trainer.num_nodes`); use {nearest}"
            )
        common: dict[str, Any] = {"batch_size": self.batch_size, "collate": self.collate, "seed": self.seed}
        common |= {"rank": rank, "world_size": world_size}
        train = ResumableLoader(
            self.train,
            shuffle=True,
            num_workers=self.num_workers,
            store_seconds=self.stream.timeout_seconds if self.stream else 0,
            sample_seeds=True,
            make_order=self._order,
            **common,
        )
        return train, ResumableLoader(self.val, shuffle=False, **common) if len(self.val) else None


class Windows:
    """Hand out a loader's batches one by one, grouped into windows: the micro-batches that one update accumulates.

    size: micro-batches per window; an epoch's last window may be shorter.
    repeats: consecutive updates that learn from the same window. If there are several updates and several micro-batches
        per window, an epoch's shorter last window is dropped.

    The state can be saved after any batch: a window that was interrupted is read again.
    """

    def __init__(self, loader: ResumableLoader, size: int = 1, repeats: int = 1) -> None:
        """
        Raises:
            ParamsError: an epoch has too few batches for a window.
        """
        self.loader = loader
        self.size = size
        self.repeats = repeats
        self.remaining: list[Batch] = []  # batches of the current window that were not handed out yet
        self.waited = 0.0  # seconds that this process waited for the loader
        self._drop_last = repeats > 1 and size > 1
        self._window_start = loader.state_dict()  # the loader's state before the current window
        self._done = 0  # batches of the current window that were handed out
        if not self.windows:
            raise ParamsError(
                f"params.yaml: an epoch has {len(loader)} batches, too few for `accumulate: {size}` with `reuse_batch`"
            )

    @property
    def windows(self) -> int:
        """Windows per epoch."""
        batches = len(self.loader)
        return batches // self.size if self._drop_last else math.ceil(batches / self.size)

    @property
    def updates(self) -> int:
        """Updates per epoch."""
        return self.windows * self.repeats

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        return min(self.windows * self.size, len(self.loader)) * self.repeats

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    @property
    def epoch_ended(self) -> bool:
        state = self.loader.state_dict()
        # All batches of the epoch are read, and the last window was handed out as often as it repeats.
        return not self._done and state["batches"] == state["steps"]

    def samples_at(self, update: int) -> int:
        """Return how many samples the first `update` updates use over all processes; repeated ones count again."""
        # update = epochs * self.updates + windows * self.repeats + repeats
        epochs, rest = divmod(update, self.updates)
        windows, repeats = divmod(rest, self.repeats)
        # Whole windows count `self.repeats` times, and the window that the last update reads `repeats` times so far.
        of_whole_windows = self._samples(self.windows) * epochs + self._samples(windows)
        of_last_window = self._samples(windows + 1) - self._samples(windows)
        return self.repeats * of_whole_windows + repeats * of_last_window

    def _samples(self, windows: int) -> int:
        """Return the number of samples in the first windows of an epoch."""
        order = self.loader.order
        # An epoch's last batch may be smaller than the others.
        return min(windows * self.size * order.batch_size, order.length)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self.loader)
        done = self._done  # after a resume, the batches of the first window that were handed out before
        while True:
            # The loader's state from which this window can be read again
            start = self._window_start if done else self.loader.state_dict()
            asked_at = time.perf_counter()
            window = list(islice(source, self.size))
            self.waited += time.perf_counter() - asked_at
            if not window:
                return
            state = self.loader.state_dict()
            if self._drop_last and state["steps"] - state["batches"] < self.size:
                for _ in source:  # drop the shorter last window, so that the loader reaches the end of the epoch
                    pass
            count = len(window) * self.repeats
            for i in range(done, count):
                # The state must be right before the batch is used: a checkpoint is saved between two batches.
                is_last = i + 1 == count
                self._window_start = self.loader.state_dict() if is_last else start
                self._done = 0 if is_last else i + 1
                # A window that repeats is handed out again from its start.
                self.remaining = window[i % len(window) + 1 :]
                yield window[i % len(window)]
            done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loader": dict(self._window_start), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the epochs of the saved run had a different number of batches.
        """
        self.loader.load_state_dict(state["loader"])
        self._window_start, self._done = dict(state["loader"]), int(state["done"])
