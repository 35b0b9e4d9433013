"""`fit`: one training loop for pretraining and fine-tuning, which goes on exactly where a kill left it."""

from __future__ import annotations

import errno
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch

# Lightning loads for seconds: only stages that train may import this file.
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from vlp_models.common.workspace import is_main_process
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.errors import CheckpointError, NonFiniteLossError, ParamsError, Preempted, ProcessLostError
from vlp_models.params import OptimizerParams, SnapshotParams, TrainerParams
from vlp_models.params.runs import TrainingParams
from vlp_models.training.curve import Recorder
from vlp_models.training.ema import WeightAverage
from vlp_models.training.fsdp import WholeWeights, put_back
from vlp_models.training.log import LOG, read_log, truncate_log
from vlp_models.training.module import LossFunction, TrainingModule
from vlp_models.training.precision import Precision, begun_in, choose_precision
from vlp_models.training.progress import ProgressDisplay
from vlp_models.training.resume import ResumePoints, newest
from vlp_models.training.snapshots import Snapshots
from vlp_models.training.stop import CooperativeStop
from vlp_models.training.strategy import make_trainer
from vlp_models.training.threads import set_threads
from vlp_models.training.windows import Windows

# What gloo and NCCL say when a process at the other end is gone, or has not answered for half an hour
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out", "Timed out", "NCCL")

# (rank, world size) -> the batches to learn from, and those to validate on
Loaders = Callable[[int, int], tuple[ResumableLoader, ResumableLoader | None]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train, in numbers. `max_steps`: updates, 0 for as many as the epochs hold."""

    seed: int
    max_epochs: int
    max_steps: int
    accumulate: int
    optimizer: OptimizerParams
    snapshots: SnapshotParams = field(default_factory=SnapshotParams)

    @classmethod
    def of(cls, section: TrainingParams) -> Plan:
        """What a section of params.yaml asks for."""
        return cls(**{f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)})

    def total_steps(self, updates: int) -> int:
        """Updates of the whole run, given those of an epoch.

        Raises:
            ParamsError: a number that can't be.
        """
        for name in ("seed", "max_steps"):
            if getattr(self, name) < 0:
                raise ParamsError(f"params.yaml: `{name}: {getattr(self, name)}` must not be negative")
        if self.max_epochs < 1:
            raise ParamsError(f"params.yaml: `max_epochs: {self.max_epochs}` must be at least 1")
        steps = updates * self.max_epochs
        return min(steps, self.max_steps) if self.max_steps else steps


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a finished run has to tell.

    rows: the log, one record an entry (training/log.py).
    samples: how many were learned from, a sample that was seen twice twice; over all processes and the whole run.
    precision: what it computed in.
    seconds: of training, by all processes that did a part of the run, those that were killed included up to their last
        checkpoint. samples_per_second: these two.
    peak_memory_mb: the most that one process of the run held, of the GPU's memory where it computes there.
    """

    steps: int
    samples: int
    resumed_from: int
    rows: list[dict[str, Any]]
    seconds: float
    samples_per_second: float
    peak_memory_mb: float
    precision: Precision
    is_main: bool  # rank 0: the one that writes results


class Tracker(Protocol):
    """Where a run is shown besides its own log. Must never stop the training."""

    def sync(self, log: Path) -> None:
        """Sends the lines of the log that were not sent yet."""
        ...


def fit(
    model: nn.Module,
    loss: LossFunction,
    loaders: Loaders,
    *,
    plan: Plan,
    trainer: TrainerParams,
    work: Path,
    title: str,
    tracker: Tracker | None = None,
) -> FitResult:
    """Trains `model` in place, from the newest whole checkpoint in `work` if there is one.

    The same params and data give the same weights and the same log, killed and resumed or not: bitwise on a CPU
    with one number of threads.

    Raises:
        Preempted: told to stop (SIGINT, SIGTERM); the state is saved.
        NonFiniteLossError: a loss or gradient is no number; the weights are as before the update.
        CheckpointError: a checkpoint can't be written, or is of another run.
        ParamsError: numbers that can't be, a device or precision this machine lacks.
        ProcessLostError: another process of the run has ended.
    """
    if plan.accumulate < 1:
        raise ParamsError(f"params.yaml: `accumulate: {plan.accumulate}` must be at least 1")
    _quiet()
    torch.set_flush_denormal(True)
    set_threads(model, trainer)
    start = newest(work, tidy=is_main_process())
    chosen = choose_precision(trainer)
    precision = (begun_in(start.path) if start else None) or chosen  # no run changes it on its way
    lightning = make_trainer(trainer, plan.optimizer, model, accumulate=plan.accumulate, precision=precision)
    batches, val = loaders(lightning.global_rank, lightning.world_size)
    train = Windows(batches, plan.accumulate, getattr(loss, "updates_per_batch", 1))
    total = plan.total_steps(train.updates)
    lightning.fit_loop.epoch_loop.max_steps = total

    module = TrainingModule(
        model,
        loss,
        seed=plan.seed,
        total_steps=total,
        optimizer=plan.optimizer,
        work=work,
        updates_per_epoch=train.updates,
        still_to_come=lambda: train.rest,
    )
    log = work / LOG
    if lightning.is_global_zero:
        truncate_log(log, start.step if start else 0)
    snapshots = _snapshots(plan, trainer, work)
    recorder = Recorder(log, trainer.log_every_steps, train, val, snapshots)
    resume_points = ResumePoints(work, trainer.checkpoint_every_steps, total)
    average = WeightAverage(plan.optimizer.ema_decay) if plan.optimizer.ema_decay else None
    synced = _Sync(tracker, log, resume_points) if tracker and lightning.is_global_zero else None
    display = ProgressDisplay(title, total)
    stop = CooperativeStop(resume_points)
    whole = WholeWeights() if trainer.strategy == "fsdp" else None
    wanted: list[Callback | None] = [
        whole,
        average,
        recorder,
        snapshots,
        resume_points,
        synced,
        display,
        stop,
    ]  # in this order
    lightning.callbacks.extend(c for c in wanted if c is not None)  # type: ignore[attr-defined]

    if lightning.is_global_zero:
        if start is not None:
            print(f"{title}: going on from step {start.step:,} of {total:,} ({start.path})", file=sys.stderr)
        if precision != chosen:
            print(f"{title}: in {precision}, as it began; begun on this machine it would be {chosen}", file=sys.stderr)
        elif trainer.precision == "bf16-where-native":
            print(f"{title}: in {precision}, which this machine is good at", file=sys.stderr)
        if tracker is not None:
            tracker.sync(log)
    try:
        lightning.fit(module, train_dataloaders=train, ckpt_path=start.path if start else None, weights_only=True)
    except (Preempted, NonFiniteLossError):  # all processes raise these together
        if not lightning.is_global_zero:
            # The first one's exit code is the run's. A launcher that sees another fail kills the first one, which may
            # still be closing its records.
            sys.exit(0)
        raise
    except (KeyError, RuntimeError) as error:
        if lightning.world_size > 1 and any(sign in str(error) for sign in LOST):
            raise ProcessLostError(
                f"{title}: another process of this run has ended ({str(error).splitlines()[0]}); its own output says "
                "why. The same command goes on from the last checkpoint"
            ) from error
        if start is None or resume_points.saved_step >= 0:  # training had begun
            raise
        raise CheckpointError(f"{start.path}: can't be resumed: {error}; delete {work} to start anew") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise CheckpointError(
            f"{work}: {error}. Nothing saved is lost: make room on the disk, then run again to go on from there"
        ) from error
    seconds = recorder.finished()
    if whole is not None and whole.weights:
        put_back(model, whole.weights)
    if average is not None:
        average.copy_to(model)
    if snapshots is not None:
        snapshots.copy_to(model)
    model.to("cpu").eval()
    rows = read_log(log)
    return FitResult(
        steps=total,
        resumed_from=start.step if start else 0,
        rows=rows,
        samples=train.samples_at(total),
        seconds=round(seconds, 2),
        samples_per_second=round(train.samples_at(total) / max(seconds, 1e-9), 1),
        peak_memory_mb=round(recorder.peak_memory_mb, 1),
        precision=precision,
        is_main=lightning.is_global_zero,
    )


def _snapshots(plan: Plan, trainer: TrainerParams, work: Path) -> Snapshots | None:
    """
    Raises:
        ParamsError: two averages at once, or a strategy that has no whole weights.
    """
    if not plan.snapshots.keep:
        return None
    if plan.optimizer.ema_decay:
        raise ParamsError(
            "params.yaml: `snapshots.keep` and `optimizer.ema_decay` would both make the result; set one of them to 0"
        )
    if trainer.strategy == "fsdp":
        raise ParamsError("params.yaml: `trainer.strategy: fsdp` can't keep snapshots yet; set `snapshots.keep: 0`")
    return Snapshots(work, plan.snapshots)


class _Sync(Callback):
    """Shows the tracker what is safe: after each checkpoint, what no resumed run will write again."""

    def __init__(self, tracker: Tracker, log: Path, resume_points: ResumePoints) -> None:
        self._tracker = tracker
        self._file = log
        self._resume_points = resume_points
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._resume_points.saved_step != self._step:
            self._step = self._resume_points.saved_step
            self._tracker.sync(self._file)


def _quiet() -> None:
    """Lightning's hints about loggers, workers and its other products mean nothing to a user of this pipeline."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\).*before.*optimizer\.step\(\).*")
