"""Writes the run's record (training/log.py) while it trains."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.training.module import TrainingModule
from vlp_models.training.normalise import means
from vlp_models.training.snapshots import Snapshots
from vlp_models.training.windows import Windows


class Recorder(Callback):
    """A line every `every` updates and at each epoch's end, there with the validation's numbers (`val_...`).

    The loss and its parts are those of the update alone, over all its items. Validation runs here, before the update is
    saved, so that a checkpoint never lies between an update and its validation.
    """

    def __init__(
        self, log: Path, every: int, train: Windows, val: ResumableLoader | None, snapshots: Snapshots | None = None
    ) -> None:
        self._file = log
        self.seconds_before = 0.0  # of the run's parts before this one
        self._peak_before = 0.0
        self._ended: float | None = None
        self._snapshots = snapshots
        self.every = every
        self._train = train
        self._val = val
        self._step = -1
        self._start = time.perf_counter()
        self._since = (0.0, 0)  # when the last line was written, and the update
        self._waited = 0.0  # for data, until then

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._start = time.perf_counter()
        self._since, self._waited = (self._start, self._step), self._train.waited

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        epoch_ended = self._train.epoch_ended
        if step % self.every and not epoch_ended:
            return
        row: dict[str, Any] = {"step": step, "epoch": self._train.epoch + 1, **_numbers(pl_module)}
        row |= self._timing(step)
        if epoch_ended and self._val is not None:
            validation = pl_module.validate(self._val)
            row |= validation
            if self._snapshots is not None:
                self._snapshots.offer(pl_module, step, validation)
        if trainer.is_global_zero:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._since, self._waited = (time.perf_counter(), step), self._train.waited

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ended = self.seconds

    def finished(self) -> float:
        """Seconds of the whole run, after its end."""
        return self._ended if self._ended is not None else self.seconds_before

    @property
    def seconds(self) -> float:
        """Of training so far, also by the processes before this one that were stopped or killed."""
        return self.seconds_before + time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "peak_memory_mb": self.peak_memory_mb}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = float(state_dict["seconds"])
        self._peak_before = float(state_dict["peak_memory_mb"])

    @property
    def peak_memory_mb(self) -> float:
        """The most that a process of the run has held."""
        return max(self._peak_before, peak_memory_mb())

    def _timing(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        seconds = now - self._since[0]
        samples = self._train.samples_at(step) - self._train.samples_at(self._since[1])
        written = int(time.time() * 1000)  # ms, as MLflow counts
        rate = round(samples / max(seconds, 1e-9), 1)
        waiting = round((self._train.waited - self._waited) / max(seconds, 1e-9), 4)  # validation is not in it
        return {"seconds": round(self.seconds, 3), "samples_per_s": rate, "waiting_share": waiting, "time": written}


def peak_memory_mb() -> float:
    """The most that this process has held: of the GPU's memory where it computes there, else of the machine's."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 1e6
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1e6 if sys.platform == "darwin" else 1e3)  # macOS tells bytes


def _numbers(module: TrainingModule) -> dict[str, float]:
    """Of the update just made."""
    found = means([micro_batch.totals for micro_batch in module.window])
    row = {name: float(value) for name, value in found.items()}
    row["lr"] = module.learning_rate
    if module.gradient_norm is not None:
        row["gradient_norm"] = float(module.gradient_norm)
    return row
