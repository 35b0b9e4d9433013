"""Progress of a training run: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlp_models.training.module import TrainingModule
from vlp_models.training.normalise import means

LINE_EVERY = 20.0  # seconds, where there is no terminal
REFRESH = 0.5  # seconds between readings of the loss: on a GPU each one waits for it


class ProgressDisplay(Callback):
    """Steps, loss, samples a second over all ranks, time left. On stderr; on rank 0 only."""

    def __init__(self, title: str, total_steps: int) -> None:
        self._title = title
        self._total = total_steps
        self._bar: Progress | None = None
        self._task: Any = None
        self._start = (0.0, 0)
        self._samples = 0
        self._shown = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = (time.perf_counter(), trainer.global_step)
        self._shown = self._start[0]
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=trainer.global_step, note="")
            self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._samples += len(pl_module.window[-1].sample_ids) * trainer.world_size
        now, step = time.perf_counter(), trainer.global_step
        wait = REFRESH if self._bar is not None else LINE_EVERY
        if not trainer.is_global_zero or (now - self._shown < wait and step != self._total):
            return
        self._shown = now
        seconds = now - self._start[0]
        rate = self._samples / seconds
        note = f"loss {float(means([pl_module.window[-1].totals])['loss']):.3f}  {rate:,.0f} samples/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=note)
            return
        left = (self._total - step) * seconds / max(1, step - self._start[1])
        print(f"{self._title}  {step:,}/{self._total:,} steps  {note}  {_clock(left)} left", file=sys.stderr)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
