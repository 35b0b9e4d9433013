"""Where a run can go on after a kill: two checkpoints, each whole or absent, each with its sha256 beside it."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vlp_models.errors import CheckpointError

KEEP = 2
_NAME = re.compile(r"step-(\d{8})\.ckpt")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    path: Path
    step: int


class ResumePoints(Callback):
    """Saves every `every` updates, and at the last one."""

    def __init__(self, work: Path, every: int, total_steps: int) -> None:
        self.work = work
        self.every = every
        self.total_steps = total_steps
        self.saved_step = -1
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = self.saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step:  # between the micro-batches of an update
            return
        self._step = step
        if step % self.every == 0 or step == self.total_steps:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """
        Raises:
            CheckpointError: the file can't be written; the ones before it are still there.
        """
        step = trainer.global_step
        if step == self.saved_step:
            return
        path = self.work / f"step-{step:08d}.ckpt"
        partial = path.with_name(f".{path.name}.partial")
        try:
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                _publish(partial, path)
                for old in _points(self.work)[KEEP:]:
                    _remove(old.path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            if trainer.is_global_zero:
                partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"{path}: can't be written: {error}. The checkpoints before it are whole: make room on the disk, then "
                "run again to go on from there"
            ) from error
        self.saved_step = step


def newest(work: Path, tidy: bool = True) -> ResumePoint | None:
    """The newest checkpoint whose content is what was written; damaged ones are set aside, with a line that says so.

    tidy: false for all processes but the first, which only look.
    """
    for point in _points(work):
        if _is_whole(point.path):
            return point
        if not tidy:
            continue
        aside = point.path.with_suffix(".damaged")
        point.path.replace(aside)
        _sidecar(point.path).unlink(missing_ok=True)
        print(
            f"{point.path}: damaged (its sha256 is not the one written beside it); set aside as {aside.name}, "
            "going on from the checkpoint before it",
            file=sys.stderr,
        )
    return None


def clear(work: Path) -> None:
    """Removes all checkpoints and snapshots: the run has ended and its result is written."""
    for path in [
        *work.glob("step-*.ckpt*"),
        *work.glob(".step-*.partial"),
        *work.glob("step-*.damaged"),
        *work.glob("*snapshot-*"),
    ]:
        path.unlink(missing_ok=True)


def _points(work: Path) -> list[ResumePoint]:
    """Newest first."""
    found = [(path, _NAME.fullmatch(path.name)) for path in work.iterdir()]
    points = [ResumePoint(path=path, step=int(match[1])) for path, match in found if match]
    return sorted(points, key=lambda point: -point.step)


def _publish(partial: Path, path: Path) -> None:
    """The sum first, then the checkpoint under its name: a crash in between leaves no checkpoint without a sum."""
    with partial.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    sidecar = _sidecar(path)
    sidecar.write_text(f"{digest}  {path.name}\n", encoding="utf-8")
    partial.replace(path)


def _is_whole(path: Path) -> bool:
    try:
        written = _sidecar(path).read_text(encoding="utf-8").split()[0]
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == written
    except (OSError, IndexError, UnicodeDecodeError):
        return False


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sidecar(path).unlink(missing_ok=True)
