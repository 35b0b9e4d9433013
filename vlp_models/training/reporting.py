"""Callbacks that report a run while it trains: the curve (training/log.py), the progress bar, the tracker."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer

from vlp_models.common.device import peak_memory_mb
from vlp_models.common.progress import ProgressBar, progress_bar
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.training.averaging import Snapshots
from vlp_models.training.data import Windows
from vlp_models.training.module import TrainingModule
from vlp_models.training.normalization import mean_losses
from vlp_models.training.resume import ResumePoints

REFRESH = 0.5  # seconds between readings of the loss for the progress bar: on a GPU each reading is a synchronization


class Recorder(Callback):
    """Write a line to the log every `every` updates and at the end of each epoch, there with a validation (`val_...`).

    The loss and its parts are means over all items of that one update. Validation runs here, before the update is
    saved, so that a checkpoint never falls between an update and its validation.
    """

    def __init__(
        self, log: Path, every: int, train: Windows, val: ResumableLoader | None, snapshots: Snapshots | None = None
    ) -> None:
        self.every = every
        self.seconds_before = 0.0  # of training by the processes before this one
        self._log = log
        self._train = train
        self._val = val
        self._snapshots = snapshots
        self.total_seconds = 0.0  # of the whole run, once it has ended
        self._peak_before = 0.0
        self._step = -1
        self._start = time.perf_counter()
        self._last_line = (0.0, 0)  # time and update of the last line
        self._waited = 0.0  # for data, until the last line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """
        Raises:
            ParamsError: the validation has no such metric as `snapshots.metric`; the first one may be hours away.
        """
        assert isinstance(pl_module, TrainingModule)
        self._step = trainer.global_step
        # A validation on one batch has the names of all metrics.
        if self._snapshots is not None and self._val is not None and self._step == 0:
            self._snapshots.check(pl_module.validation_metrics(itertools.islice(self._val, 1)))
        self._start = time.perf_counter()
        self._last_line, self._waited = (self._start, self._step), self._train.waited

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        step = trainer.global_step
        if step == self._step:  # between the micro-batches of an update
            return
        self._step = step
        epoch_ended = self._train.epoch_ended
        # A line every `every` updates, at the end of each epoch, and after the last update.
        if step % self.every and not epoch_ended and step < trainer.max_steps:
            return
        # The losses of the update that just ended, over all of its micro-batches and all processes
        losses = mean_losses([micro_batch.totals for micro_batch in pl_module.window])
        row: dict[str, Any] = {"step": step, "epoch": self._train.epoch + 1}
        row |= {name: float(value) for name, value in losses.items()}
        row["lr"] = pl_module.learning_rate
        if pl_module.gradient_norm is not None:
            row["gradient_norm"] = float(pl_module.gradient_norm)
        # Speed since the last line; `waiting_share` is the loader's part of that time, without validation.
        seconds = max(time.perf_counter() - self._last_line[0], 1e-9)
        samples = self._train.samples_at(step) - self._train.samples_at(self._last_line[1])
        row["seconds"] = round(self.seconds, 3)
        row["samples_per_s"] = round(samples / seconds, 1)
        row["waiting_share"] = round((self._train.waited - self._waited) / seconds, 4)
        row["time"] = int(time.time() * 1000)  # ms, as in MLflow
        if epoch_ended and self._val is not None:
            validation = pl_module.validate(self._val)
            row |= validation
            if self._snapshots is not None:
                self._snapshots.offer(pl_module, step, validation)
        if trainer.is_global_zero:
            # Opened for each line, so that a kill cuts off the last line at most.
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        # Taken after the validation, whose time is not part of the next line's speed.
        self._last_line, self._waited = (time.perf_counter(), step), self._train.waited

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.total_seconds = self.seconds

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including the processes before this one that were stopped or killed."""
        return self.seconds_before + time.perf_counter() - self._start

    @property
    def peak_memory_mb(self) -> float:
        """The most memory that a process of the run has held."""
        return max(self._peak_before, peak_memory_mb())

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "peak_memory_mb": self.peak_memory_mb}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = self.total_seconds = float(state_dict["seconds"])
        self._peak_before = float(state_dict["peak_memory_mb"])


class ProgressDisplay(Callback):
    """Show steps, loss, samples per second over all ranks, and time left on stderr; on rank 0 only."""

    def __init__(self, title: str, total_steps: int) -> None:
        self._title = title
        self._total = total_steps
        self._bar: ProgressBar | None = None
        self._closing = ExitStack()
        self._start = 0.0
        self._samples = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()
        if trainer.is_global_zero:
            bar = progress_bar(self._title, self._total, "steps", completed=trainer.global_step)
            self._bar = self._closing.enter_context(bar)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._samples += len(pl_module.window[-1].sample_ids) * trainer.world_size
        if self._bar is None:
            return
        step = trainer.global_step
        if step != self._total and not self._bar.is_due(REFRESH):
            return
        rate = self._samples / (time.perf_counter() - self._start)
        loss = float(mean_losses([pl_module.window[-1].totals])["loss"])
        self._bar.update(step, f"loss {loss:.3f}  {rate:,.0f} samples/s", force=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._closing.close()
        self._bar = None


class Tracker(Protocol):
    """Where a run is shown besides its own log (MLflow). It must never stop the training."""

    def sync(self, log: Path) -> None:
        """Send the lines of the log that were not sent yet."""
        ...


class TrackerSync(Callback):
    """Sync the tracker after each checkpoint, so that it never receives a line that a resumed run would write again."""

    def __init__(self, tracker: Tracker, log: Path, resume_points: ResumePoints) -> None:
        self._tracker = tracker
        self._log = log
        self._resume_points = resume_points
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._resume_points.saved_step != self._step:
            self._step = self._resume_points.saved_step
            self._tracker.sync(self._log)
