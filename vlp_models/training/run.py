"""`fit`: the training loop of pretraining and fine-tuning, which resumes exactly where a kill left it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

# Lightning takes seconds to import: only stages that train may import this file.
from lightning.pytorch import Callback, Trainer
from torch import nn

from vlp_models.common.device import is_main_process
from vlp_models.common.log import get_logger
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.errors import (
    CheckpointError,
    NonFiniteLossError,
    Preempted,
    ProcessLostError,
    explain_system_error,
    find_exhausted,
    first_line,
    is_disk_full,
)
from vlp_models.params import OptimizerParams, SnapshotParams, TrainerParams
from vlp_models.params.runs import TrainingParams
from vlp_models.training.averaging import Snapshots, WeightAverage
from vlp_models.training.data import Windows
from vlp_models.training.distributed import (
    Precision,
    block_options,
    choose_precision,
    keep_threads,
    make_trainer,
    read_precision_and_threads,
    set_threads,
)
from vlp_models.training.log import LOG, read_log, truncate_log
from vlp_models.training.module import LossFunction, TrainingModule
from vlp_models.training.processes import count_processes, forked_processes
from vlp_models.training.reporting import ProgressDisplay, Recorder, Tracker, TrackerSync
from vlp_models.training.resume import CooperativeStop, ResumePoint, ResumePoints, newest_resume_point
from vlp_models.vision.batch_norm import fix_batch_norm_gradients

logger = get_logger(__name__)

# (rank, world size) -> the batches to train on, and those to validate on
Loaders = Callable[[int, int], tuple[ResumableLoader, ResumableLoader | None]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how to train. `max_steps`: updates, over as many epochs as they take; 0: `max_epochs` decides."""

    seed: int
    max_epochs: int
    max_steps: int
    accumulate: int
    optimizer: OptimizerParams
    cpu_processes: int = 1
    snapshots: SnapshotParams = field(default_factory=SnapshotParams)

    @classmethod
    def of(cls, section: TrainingParams) -> Plan:
        """Return the plan of a run in params.yaml."""
        # A section without some of these settings gets their defaults.
        return cls(**{f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)})


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The outcome of a finished run.

    rows: the log (training/log.py).
    samples: how many were used over all processes and the whole run; one that was used twice counts twice.
    seconds: of training, including processes of this run that were killed, up to their last checkpoint.
    samples_per_second: samples / seconds.
    peak_memory_mb: peak memory of any process (GPU memory when training on a GPU).
    is_main: whether this is rank 0, which writes the results.
    """

    steps: int
    samples: int
    resumed_from: int
    rows: list[dict[str, Any]]
    seconds: float
    samples_per_second: float
    peak_memory_mb: float
    precision: Precision
    is_main: bool


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
    """Train `model` in place, from the newest intact checkpoint in `work` if there is one.

    The same params and data give the same weights and the same log, whether the run is killed and resumed or not:
    bitwise on a CPU with a fixed number of threads.

    Raises:
        Preempted: stopped by SIGINT or SIGTERM; the state is saved.
        NonFiniteLossError: a loss or gradient is not finite; the weights are those before the update.
        CheckpointError: a checkpoint can't be written, or belongs to another run.
        ParamsError: a device or precision this machine lacks, or an epoch too short for the settings.
        ProcessLostError: another process of the run has ended.
    """
    _silence_lightning()
    torch.set_flush_denormal(True)  # vanishing activations and moments are slow on CPUs otherwise
    processes = count_processes(plan.cpu_processes, trainer, model, getattr(loaders, "batch_size", 0))
    trainer = replace(trainer, devices=max(trainer.devices, processes))
    set_threads(model, trainer)
    fix_batch_norm_gradients(model)  # `build_model` did it for the model; a task's head may have batch norms as well
    with forked_processes(processes):
        return _fit(model, loss, loaders, plan=plan, trainer=trainer, work=work, title=title, tracker=tracker)


def _fit(
    model: nn.Module,
    loss: LossFunction,
    loaders: Loaders,
    *,
    plan: Plan,
    trainer: TrainerParams,
    work: Path,
    title: str,
    tracker: Tracker | None,
) -> FitResult:
    """Train in this process, as one of `trainer.devices` times `trainer.num_nodes`."""
    # The newest checkpoint, with the precision and threads of the run's first start.
    start = newest_resume_point(work, tidy=is_main_process())
    machine_precision = choose_precision(trainer)
    precision = machine_precision
    if start is not None:  # a run keeps its precision on another machine, and its threads
        precision, threads = read_precision_and_threads(start.path)
        keep_threads(threads, trainer, title)
    # The trainer, and the data of this process. An update is a window of micro-batches.
    lightning = make_trainer(trainer, model, accumulate=plan.accumulate, precision=precision)
    batches, val = loaders(lightning.global_rank, lightning.world_size)
    train = Windows(batches, plan.accumulate, getattr(loss, "updates_per_batch", 1))
    # Only now is the length of an epoch known, and with it the number of updates.
    total = plan.max_steps or train.updates * plan.max_epochs
    lightning.fit_loop.epoch_loop.max_steps = total
    module = TrainingModule(
        model,
        loss,
        seed=plan.seed,
        total_steps=total,
        optimizer=plan.optimizer,
        work=work,
        updates_per_epoch=train.updates,
        remaining=lambda: train.remaining,
    )

    log = work / LOG
    # At most one of the two averages the weights (`Plan.check`).
    average = WeightAverage(plan.optimizer.ema_decay) if plan.optimizer.ema_decay else None
    snapshots = Snapshots(work, plan.snapshots) if plan.snapshots.keep else None
    recorder = Recorder(log, trainer.log_every_steps, train, val, snapshots)
    resume_points = ResumePoints(work, trainer.checkpoint_every_steps, total)
    is_main = lightning.is_global_zero
    # The order matters: what changes the state of an update comes before the resume points save it, and the tracker
    # after them.
    callbacks: list[Callback | None] = [
        average,
        recorder,
        snapshots,
        resume_points,
        TrackerSync(tracker, log, resume_points) if tracker and is_main else None,
        ProgressDisplay(title, total),
        CooperativeStop(resume_points),
    ]
    lightning.callbacks.extend(callback for callback in callbacks if callback)  # type: ignore[attr-defined]

    if is_main:
        if start is not None:
            logger.info("%s: resuming from step %s of %s (%s)", title, f"{start.step:,}", f"{total:,}", start.path)
        _log_precision(title, precision, machine_precision, trainer)
        truncate_log(log, start.step if start else 0)
        if tracker is not None:
            tracker.sync(log)
    with block_options(model, trainer):
        _run_lightning(lightning, module, train, start, title, resume_points)

    # The result: whole weights, averaged if the params configure it, on the CPU.
    if module.sharding is not None:
        module.sharding.undo()
    for averaged in (average, snapshots):
        if averaged is not None:
            averaged.copy_to(model)
    model.to("cpu").eval()
    seconds, samples = recorder.total_seconds, train.samples_at(total)
    return FitResult(
        steps=total,
        resumed_from=start.step if start else 0,
        rows=read_log(log),
        samples=samples,
        seconds=round(seconds, 2),
        samples_per_second=round(samples / max(seconds, 1e-9), 1),
        peak_memory_mb=round(recorder.peak_memory_mb, 1),
        precision=precision,
        is_main=is_main,
    )


def _run_lightning(
    lightning: Trainer,
    module: TrainingModule,
    train: Windows,
    start: ResumePoint | None,
    title: str,
    resume_points: ResumePoints,
) -> None:
    """Train to the end; see `fit` for the errors."""
    try:
        lightning.fit(module, train_dataloaders=train, ckpt_path=start.path if start else None, weights_only=True)
    except (Preempted, NonFiniteLossError):  # all processes raise these together
        if not lightning.is_global_zero:
            # The run's exit code is rank 0's. When another process fails, the launcher kills rank 0, which may still
            # be closing its records.
            sys.exit(0)
        raise
    except (KeyError, RuntimeError, OSError) as error:
        trained = resume_points.saved_step >= 0
        explained = _explain(error, title, resume_points.work, start, lightning.world_size, trained=trained)
        if explained is None:
            raise
        raise explained from error


def _log_precision(title: str, precision: Precision, machine_precision: Precision, trainer: TrainerParams) -> None:
    if precision != machine_precision:
        logger.info(
            "%s: keeping precision %s from the start of the run (this machine would use %s)",
            title,
            precision,
            machine_precision,
        )
    elif trainer.precision == "bf16-where-native":
        logger.info("%s: precision %s, native on this machine", title, precision)


def _explain(
    error: Exception, title: str, work: Path, start: ResumePoint | None, processes: int, *, trained: bool
) -> ProcessLostError | CheckpointError | None:
    """Return an error with a way out for a failure of Lightning's `fit`, or None if it is not a known one.

    Args:
        trained: whether training has started, so that the checkpoint was loaded.
    """
    if isinstance(error, OSError):
        if not is_disk_full(error):
            return None
        return CheckpointError(
            f"{work}: {explain_system_error(error)}. Saved checkpoints are intact: run again to resume"
        )
    # "Caught ... in DataLoader worker process": an error of the code, with its traceback; the process lives.
    if "DataLoader" in str(error) and not str(error).startswith("Caught "):
        return ProcessLostError(
            f"{title}: a loader process was lost ({first_line(error).strip(' .')}). If the machine ran out of memory, "
            "lower `trainer.num_workers`. The same command resumes from the last checkpoint"
        )
    # Errors of gloo are recognized by the path in their message.
    unconnected = isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL"))
    if processes > 1 and unconnected:
        reason = first_line(error).rpartition("] ")[2].partition(". ")[0]
        if not trained:
            return ProcessLostError(
                f"{title}: the processes of this run cannot connect ({reason}); see the output of all, and check the "
                "network: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name its interface"
            )
        return ProcessLostError(
            f"{title}: another process of this run has ended ({reason}); see its output for the reason. The same "
            "command resumes from the last checkpoint"
        )
    if start is None or trained or find_exhausted(error):
        return None
    return CheckpointError(f"{start.path}: can't be resumed: {error}; delete {work} to start over")


def _silence_lightning() -> None:
    """Hide Lightning's hints on loggers, workers and its other products, which do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    # Nothing changes the keys and values that attention returns in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\).*before.*optimizer\.step\(\).*")
