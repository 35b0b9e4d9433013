"""Stopping when told to: save, then leave with an exit code that says the work is not done."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vlp_models.errors import Preempted
from vlp_models.training.resume import ResumePoints

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class CooperativeStop(Callback):
    """SIGINT and SIGTERM set a flag; the update under way is finished, saved, and `Preempted` (exit 75) raised.

    Lightning's own SIGTERM path ends with exit code 0, which DVC would take for success. Must come after every
    callback whose state belongs to an update. All ranks stop at the same update.
    """

    def __init__(self, resume_points: ResumePoints) -> None:
        self._resume_points = resume_points
        self._before: dict[int, Any] = {}
        self._asked = False
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step:  # gradients of half an update are nowhere saved
            return
        self._step = step
        if not trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            return
        self._resume_points.save(trainer)
        if trainer.is_global_zero:
            print(f"stopped as asked; step {step} is saved, the same command goes on from there", file=sys.stderr)
        raise Preempted

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
