"""Fine-tunings beside each other: those that start from finished checkpoints, each with its share of the CPUs.

DVC runs one stage after the other. Two `dvc repro --single-item` in one workspace, of stages that write to different
places, get along: DVC locks paths, not the whole workspace, while a stage runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from vlp_models.params import Params


class Supervised(Protocol):
    """Runs commands in an environment, so many at a time; the first exit code that is not 0."""

    def __call__(self, commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int: ...


def finetune_in_parallel(params: Params, root: Path, environment: dict[str, str], supervised: Supervised) -> int:
    """Train the stale fine-tunings that start from pretrained models, `trainer.parallel_finetune` at a time.

    Their inputs are brought up to date first. Returns the first exit code that is not 0.

    Does nothing where there is nothing to gain: a GPU (it is shared worse than CPUs), or fewer than two such runs.
    """
    starts = {
        name: run.start
        for name, run in params.finetune.items()
        if not run.start.startswith("finetune/") and not run.augment.captions  # which another fine-tuning writes
    }
    if params.trainer.parallel_finetune < 2 or len(starts) < 2 or not _on_cpu(params):
        return 0
    stale = _stale(root, [f"finetune@{name}" for name in starts], environment)
    names = [name for name in starts if f"finetune@{name}" in stale or stale & _leading_to(params, starts[name])]
    if len(names) < 2:
        return 0
    before = sorted({start.replace("/", "@", 1) for start in (starts[name] for name in names)})
    code = supervised([[sys.executable, "-m", "dvc", "repro", *before]], environment)
    if code:
        return code
    at_once = min(params.trainer.parallel_finetune, len(names))
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    # Two progress bars would write over each other.
    own = {**environment, "TERM": "dumb", "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", threads)}
    print(f"fine-tuning {at_once} at a time: {', '.join(names)}", file=sys.stderr)
    return supervised([_single(name) for name in names], own, at_once=at_once)


def _single(name: str) -> list[str]:
    return [sys.executable, "-m", "dvc", "repro", "--single-item", f"finetune@{name}"]


def _on_cpu(params: Params) -> bool:
    if params.trainer.accelerator != "auto":
        return params.trainer.accelerator == "cpu"
    import torch

    return not torch.cuda.is_available()


def _leading_to(params: Params, start: str) -> set[str]:
    """The stages that make the checkpoints which lead there, and what they share."""
    chain = {checkpoint.replace("/", "@", 1) for checkpoint in params.chain(start)}
    return chain | {"shards", "tokenizer", "features", "detector", "validate", "plan"}


def _stale(root: Path, targets: list[str], environment: dict[str, str]) -> set[str]:
    """The stages, among these and what they depend on, that `dvc status` finds changed."""
    command = [sys.executable, "-m", "dvc", "status", "--json", "--with-deps", *targets]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    try:
        return set(json.loads(done.stdout))
    except json.JSONDecodeError:
        return set()
