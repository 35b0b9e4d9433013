"""Resume state: a killed or stopped run continues exactly from its last checkpoint.

It is written to `.work/STAGE-RUN/FINGERPRINT/` (`TrainingJob.work`, pipeline/training_job.py):

    step-00000200.ckpt          weights, optimizer, scheduler (Lightning); cursor of data loader and windows (data.py);
                                number of micro-batches, which seeds all random numbers, precision, threads (module.py);
                                weight average and snapshots (averaging.py); seconds and peak memory (reporting.py)
    step-00000200.ckpt.sha256   its hash; the last two checkpoints are kept
    step-00000200.damaged       a checkpoint whose hash did not match
    snapshot-00000180.safetensors   weights after a good validation, with a hash of its own (training/averaging.py)
    log.jsonl                   the curve (training/log.py)
    provenance.json             data, code and parents of the run (pipeline/lineage.py)
    mlflow.json                 id of the MLflow run (registry/mlflow_run.py)
    non-finite-step-N.json      samples of a step whose loss was not finite (module.py)
    finished/, finished.json    the result of a finished run that DVC may not record (pipeline/unrecorded_results.py)

A checkpoint is complete or absent. `clear_resume_points` deletes checkpoints and snapshots once the result is
published.
"""

from __future__ import annotations

import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vlp_models.common.io import hash_file, sync_to_disk
from vlp_models.common.log import announce_stop, get_logger
from vlp_models.errors import CheckpointError, Preempted, explain_system_error

logger = get_logger(__name__)

KEEP = 2  # checkpoints
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `step-00000200.ckpt`: the update in eight digits; partial, damaged and hash files do not match.
_NAME = re.compile(r"step-(\d{8})\.ckpt")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    path: Path
    step: int


class ResumePoints(Callback):
    """Save a checkpoint every `every` updates and after the last one."""

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
        """Save the current step, unless it is saved already.

        Raises:
            CheckpointError: the file can't be written; earlier checkpoints are intact.
        """
        step = trainer.global_step
        if step == self.saved_step:
            return
        path = self.work / f"step-{step:08d}.ckpt"
        partial = path.with_name(f".{path.name}.partial")
        try:
            # Called on every process, because sharded weights are gathered from all of them.
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                # The hash comes first: a crash in between leaves no checkpoint without one.
                digest = hash_file(partial)
                # On disk before it gets its name: after a power failure, a checkpoint is whole or not there.
                sync_to_disk(partial)
                write_hash(path, digest)
                partial.replace(path)
                for old in _resume_points(self.work)[KEEP:]:
                    old.path.unlink(missing_ok=True)
                    hash_file_of(old.path).unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            if trainer.is_global_zero:
                partial.unlink(missing_ok=True)
            # torch's handler of signals raises this wherever the process is; it does not concern the file.
            if "DataLoader worker" in str(error):
                raise
            raise CheckpointError(
                f"{path}: cannot be written: {explain_system_error(error)}. Earlier checkpoints are intact: run again "
                "to resume from the last one"
            ) from error
        self.saved_step = step


def newest_resume_point(work: Path, tidy: bool = True) -> ResumePoint | None:
    """Return the newest checkpoint that matches its hash; move damaged ones aside with a warning.

    Args:
        tidy: False on all processes but the first, which must not move files.
    """
    for point in _resume_points(work):
        if is_intact(point.path):
            return point
        if not tidy:
            continue
        aside = point.path.with_suffix(".damaged")
        point.path.replace(aside)
        hash_file_of(point.path).unlink(missing_ok=True)
        logger.warning(
            "%s: damaged (its sha256 does not match); moved to %s, trying the checkpoint before it",
            point.path,
            aside.name,
        )
    return None


def clear_resume_points(work: Path) -> None:
    """Delete all checkpoints and snapshots: the run has ended and its result is written."""
    for pattern in ("step-*.ckpt*", ".step-*.partial", "step-*.damaged", "*snapshot-*"):
        for path in list(work.glob(pattern)):
            path.unlink(missing_ok=True)


def _resume_points(work: Path) -> list[ResumePoint]:
    """Return the checkpoints, newest first."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in work.iterdir()]
    points = [ResumePoint(path=path, step=int(match[1])) for path, match in matches if match]
    return sorted(points, key=lambda point: -point.step)


def is_intact(path: Path) -> bool:
    """Return whether a checkpoint or snapshot exists and matches its hash."""
    try:
        return hash_file(path) == hash_file_of(path).read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return False


def write_hash(path: Path, digest: str) -> None:
    """Write the hash of a file, in the form that sha256sum reads."""
    hash_file_of(path).write_text(f"{digest}  {path.name}\n", encoding="utf-8")


def hash_file_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


class CooperativeStop(Callback):
    """On SIGINT or SIGTERM, finish the current update, save it and raise `Preempted` (exit code 75) on all ranks.

    Lightning's own SIGTERM handler exits with code 0, which DVC would take for success. This must come after every
    callback whose state belongs to an update.
    """

    def __init__(self, resume_points: ResumePoints) -> None:
        self._resume_points = resume_points
        self._handlers: dict[int, Any] = {}  # the handlers before training
        self._stop_requested = False
        self._step, self._is_first_rank = -1, True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step, self._is_first_rank = trainer.global_step, trainer.is_global_zero
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._request_stop) for number in STOP_SIGNALS}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # A signal may reach one process only, or several at different times: all stop after the same update.
        step = trainer.global_step
        if step == self._step:  # accumulated gradients are not part of the saved state
            return
        self._step = step
        if not trainer.strategy.reduce_boolean_decision(self._stop_requested, all=False):
            return
        self._resume_points.save(trainer)
        if trainer.is_global_zero:
            logger.info("stopped by a signal; step %d is saved, the same command resumes from there", step)
        raise Preempted

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stop_requested and self._is_first_rank:
            announce_stop("stopping after the current update, which is saved")
        self._stop_requested = True
