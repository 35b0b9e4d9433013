"""`vlp verify-resume`: check that a killed and resumed training equals an uninterrupted one, bit by bit.

Both run one of the project's trainings for a few updates, in folders of their own under .work, with the project's data
and start checkpoint. The kill is a SIGKILL as soon as a checkpoint exists to resume from.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.environment import command_environment
from vlp_models.common.io import hash_file, scratch_directory, symlink_or_copy
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, read_yaml, split_start
from vlp_models.params.schema import suggestion

EVERY = 2  # updates between checkpoints
DATA = (
    "data/shards",
    "data/contents",
    "data/tokenizer",
    "data/features",
    "data/detector",
    "data/augmented",
    "data/validated",
)


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """The outcome of a comparison.

    killed_at: the last update that the killed training had saved. differ: each file that differs, and how.
    """

    run: str
    steps: int
    killed_at: int
    files: int
    differ: list[str]


def verify_resume(params: Params, workspace: Workspace, run: str = "", steps: int = 6) -> ResumeCheck:
    """Train twice, once uninterrupted and once killed and resumed, and compare the checkpoints.

    Args:
        run: `pretrain/NAME` or `finetune/NAME`; default: the first one in params.yaml.
        steps: updates of the short training.

    Raises:
        ParamsError: no such run, or too few updates for a kill in between.
        DataError: the data or the start checkpoint are missing; the training fails, or ends before it can be killed.
    """
    names = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
    run = run or next(iter(names), "")
    if run not in names:
        raise ParamsError(f"{run or 'params.yaml'}: no such run{suggestion(run, names)}")
    if steps <= EVERY:
        raise ParamsError(f"--steps: must be above {EVERY}, or nothing is left to resume")
    kind, name = split_start(run)
    start = params.start_of(kind, name)
    require_output(workspace.shards, "shards")
    require_output(workspace.tokenizer, "tokenizer")
    if start:
        require_output(workspace.checkpoint(start), start.replace("/", "@", 1))
    with scratch_directory(workspace.root / ".work" / "verify-resume") as temporary:
        whole, killed = temporary / "whole", temporary / "killed"
        for folder in (whole, killed):
            _prepare(folder, workspace, kind, name, start, steps)
        # The killed training resumes from its last checkpoint in the second call.
        _train(whole, kind, name)
        killed_at = _train(killed, kind, name, kill=True)
        _train(killed, kind, name)
        checkpoints = [Workspace(root).checkpoint(run) for root in (whole, killed)]
        files = {path.relative_to(root) for root in checkpoints for path in root.rglob("*") if path.is_file()}
        differences = [_difference(checkpoints[0] / file, checkpoints[1] / file) for file in sorted(files)]
    return ResumeCheck(
        run=run, steps=steps, killed_at=killed_at, files=len(files), differ=[line for line in differences if line]
    )


def _prepare(root: Path, workspace: Workspace, kind: str, name: str, start: str | None, steps: int) -> None:
    """Create a workspace with links to the project's data, and its params with a short training and no MLflow."""
    import yaml

    root.mkdir()
    raw: dict[str, Any] = read_yaml(str(workspace.root / "params.yaml"))
    raw[kind][name] = {**(raw[kind][name] or {}), "max_steps": steps}
    raw["trainer"] = {**(raw.get("trainer") or {}), "checkpoint_every_steps": EVERY, "log_every_steps": 1}
    raw["tracking"] = {**(raw.get("tracking") or {}), "uri": ""}
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    for path in (*DATA, *([f"checkpoints/{start}"] if start else [])):
        source = workspace.root / path
        if source.exists():
            symlink_or_copy(source, root / path)


def _train(root: Path, kind: str, name: str, *, kill: bool = False) -> int:
    """Train to the end or, with `kill`, until a checkpoint is saved; return the update of the last saved checkpoint."""
    log, saved = root / "log.txt", 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlp_models.cli.main", "stage", kind, name],
            cwd=root,
            env=command_environment(),  # the stage must not believe that DVC runs it
            stdout=output,
            stderr=subprocess.STDOUT,
            # A session of its own, so that the kill reaches its data loaders as well.
            start_new_session=True,
        )
    try:
        while process.poll() is None and not (kill and saved):
            # Poll often: a short training may end soon after its first checkpoint.
            time.sleep(0.02)
            states = sorted((root / ".work" / f"{kind}-{name}").glob("*/step-*.ckpt"))
            saved = int(states[-1].stem.partition("-")[2]) if states else 0
    finally:
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
    if kill and ended:
        raise DataError(f"{kind} {name}: the training ended before it could be killed; raise --steps:\n{lines}")
    if process.returncode and not kill:
        raise DataError(f"{kind} {name}: the short training failed with exit code {process.returncode}:\n{lines}")
    return saved


def _difference(a: Path, b: Path) -> str:
    """Describe how two files differ; "" if they are bitwise equal."""
    if not (a.exists() and b.exists()):
        return f"{a.name}: missing in one of them"
    if hash_file(a) == hash_file(b):
        return ""
    if a.suffix != ".safetensors":
        return f"{a.name}: differs"
    import numpy as np
    from safetensors.numpy import load_file

    # Not equal bit by bit: report how many tensors differ, and by how much.
    tensors, others = load_file(a), load_file(b)
    differing = [key for key in tensors if key not in others or tensors[key].tobytes() != others[key].tobytes()]
    deviations = [
        float(np.abs(tensors[key].astype(np.float64) - others[key]).max()) for key in differing if key in others
    ]
    largest = max(deviations, default=0.0)
    return f"{a.name}: {len(differing)} of {len(tensors)} tensors differ, by up to {largest:.3g}"
