"""The batches of a run, cut into windows: the micro-batches that one update adds up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from vlp_models.data.batch import Batch
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.errors import ParamsError


class Windows:
    """Hands out a loader's batches one by one, and knows which of the window are still to come.

    size: micro-batches a window; an epoch's last one may be shorter.
    repeats: updates that learn from the same window one after the other. With several micro-batches a window, too, an
        epoch's shorter rest is left out.

    Can be saved after any batch: a window that was under way is read again.
    """

    def __init__(self, loader: ResumableLoader, size: int = 1, repeats: int = 1) -> None:
        """
        Raises:
            ParamsError: an epoch has too few batches for a window.
        """
        self.loader = loader
        self.size = size
        self.repeats = repeats
        self.rest: list[Batch] = []  # of the window under way: what has not been handed out, as it came from the loader
        self._drops_rest = repeats > 1 and size > 1
        self._before = loader.state_dict()  # of the loader, before the window under way
        self._done = 0  # handed out since
        self.waited = 0.0  # seconds for the loader, in this process
        if not self.windows:
            raise ParamsError(
                f"params.yaml: an epoch has {len(loader)} batches, too few for `accumulate: {size}` with `reuse_batch`"
            )

    @property
    def windows(self) -> int:
        """An epoch's."""
        batches = len(self.loader)
        return batches // self.size if self._drops_rest else math.ceil(batches / self.size)

    @property
    def updates(self) -> int:
        """An epoch's."""
        return self.windows * self.repeats

    def __len__(self) -> int:
        """Micro-batches that an epoch hands out."""
        return min(self.windows * self.size, len(self.loader)) * self.repeats

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    @property
    def epoch_ended(self) -> bool:
        state = self.loader.state_dict()
        return not self._done and state["batches"] == state["steps"]

    def samples_at(self, update: int) -> int:
        """How many samples the first `update` updates learn from, over all processes; a repeated one counts again."""
        epochs, rest = divmod(update, self.updates)
        windows, repeats = divmod(rest, self.repeats)
        whole = self._samples(self.windows) * epochs + self._samples(windows)
        return self.repeats * whole + repeats * (self._samples(windows + 1) - self._samples(windows))

    def _samples(self, windows: int) -> int:
        """In the first windows of an epoch."""
        order = self.loader.order
        return min(windows * self.size * order.batch_size, order.length)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self.loader)
        done = self._done
        while True:
            before = self._before if done else self.loader.state_dict()
            asked = time.perf_counter()
            window = list(islice(source, self.size))
            self.waited += time.perf_counter() - asked
            if not window:
                return
            state = self.loader.state_dict()
            if self._drops_rest and state["steps"] - state["batches"] < self.size:
                for _ in source:  # the rest; the loader must be at the epoch's end
                    pass
            count = len(window) * self.repeats
            for i in range(done, count):
                self._before, self._done = (before, i + 1) if i + 1 < count else (self.loader.state_dict(), 0)
                self.rest = window[i % len(window) + 1 :]
                yield window[i % len(window)]
            done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loader": dict(self._before), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the epochs of the saved run had another number of batches.
        """
        self.loader.load_state_dict(state["loader"])
        self._before, self._done = dict(state["loader"]), int(state["done"])
