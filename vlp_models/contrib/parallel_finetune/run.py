"""Run fine-tunings that start from finished checkpoints, and their evaluations, in parallel, each with its share of the
CPUs.

DVC runs one stage after the other. Two `dvc repro --single-item` of stages with different outputs can run in one
workspace, because DVC locks paths, not the whole workspace, while a stage runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from vlp_models.common.device import cpu_count, use_cuda
from vlp_models.common.log import get_logger
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.pipeline.dvc.repro import PARTIAL, REPRO
from vlp_models.pipeline.dvc.stale import read_stale

logger = get_logger(__name__)


class RunCommands(Protocol):
    """Runs commands in an environment, `at_once` at a time; returns the first exit code that is not 0."""

    def __call__(self, commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int: ...


def finetune_in_parallel(params: Params, root: Path, environment: dict[str, str], run: RunCommands) -> int:
    """Train the stale fine-tunings that start from pretrained models, `trainer.parallel_finetune` at a time.

    Their inputs are brought up to date first. Nothing is run if there is nothing to gain: on a GPU, which fine-tunings
    would share badly, with a launcher, or with fewer than two such runs.

    Returns:
        The first exit code that is not 0.
    """
    # run -> its start, for runs that need no other fine-tuning
    starts = {
        name: entry.start
        for name, entry in params.finetune.items()
        # Generated captions come from another fine-tuning, and parts from their own.
        if not entry.start.startswith("finetune/") and not entry.augment.captions and entry.parts == 1
    }
    trainer = params.trainer
    on_cpu = trainer.accelerator in ("auto", "cpu") and not use_cuda(trainer.accelerator)
    if trainer.parallel_finetune < 2 or len(starts) < 2 or not on_cpu or trainer.launcher != "local":
        return 0
    # A run may have to be trained if it is stale, or anything before it is: all that has no run in its name.
    stale = _find_stale(root, [f"finetune@{name}" for name in starts])
    per_run = ("initial@", "pretrain@", "finetune@", "evaluate@", "augment@")
    is_shared_stale = any(not stage.startswith(per_run) for stage in stale)
    names = []
    for name, start in starts.items():
        inputs = {checkpoint.replace("/", "@", 1) for checkpoint in params.chain(start)}
        if is_shared_stale or f"finetune@{name}" in stale or stale & inputs:
            names.append(name)
    if len(names) < 2:
        return 0
    # First their starts, with everything before them, in one DVC.
    environment = {**environment, PARTIAL: "1"}
    code = run([[*REPRO, *sorted({starts[name].replace("/", "@", 1) for name in names})]], environment)
    if code:
        return code
    stale = _find_stale(root, [f"finetune@{name}" for name in names])  # equal inputs leave it valid
    names = [name for name in names if f"finetune@{name}" in stale]
    if len(names) < 2:
        return 0
    # each run gets its share of the CPUs
    at_once = min(params.trainer.parallel_finetune, len(names))
    threads = str(max(1, cpu_count() // at_once))
    # A dumb terminal: two progress bars would overwrite each other.
    environment = {**environment, "TERM": "dumb", "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", threads)}
    logger.info("fine-tunings to bring up to date, %d at a time: %s", at_once, ", ".join(names))
    # Each is evaluated at once, while another may still train.
    chains = [[*REPRO, "--single-item", f"finetune@{name}", f"evaluate@{name}"] for name in names]
    return run(chains, environment, at_once=at_once)


def _find_stale(root: Path, targets: list[str]) -> set[str]:
    """Return the stages, among the targets and what they depend on, that `dvc status` reports as changed."""
    try:
        return set(read_stale(root, targets))
    # Nothing counts as stale, so nothing is run in parallel: the `dvc repro` that follows reports the reason.
    except DataError:
        return set()
