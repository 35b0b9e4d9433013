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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file, scratch_directory
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
    differ: list[str] = field(default_factory=list)


def verify_resume(params: Params, workspace: Workspace, run: str = "", steps: int = 6) -> ResumeCheck:
    """Train twice, once uninterrupted and once killed and resumed, and compare the checkpoints.

    Args:
        run: `pretrain/NAME` or `finetune/NAME`; default: the first one in params.yaml.
        steps: updates of the short training.

    Raises:
        ParamsError: no such run, or too few updates for a kill in between.
        DataError: the data or the start checkpoint are missing; the training fails, or ends before it can be killed.
    """
    known = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
    run = run or next(iter(known), "")
    if run not in known:
        raise ParamsError(f"{run or 'params.yaml'}: no such run{suggestion(run, known)}; known: {', '.join(known)}")
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
        _train(whole, kind, name)
        killed_at = _train_and_kill(killed, kind, name)
        _train(killed, kind, name)
        checkpoints = [Workspace(root).checkpoint(run) for root in (whole, killed)]
        files = sorted({path.relative_to(one) for one in checkpoints for path in one.rglob("*") if path.is_file()})
        differences = [_difference(checkpoints[0] / file, checkpoints[1] / file) for file in files]
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
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(source.absolute())


def _start(root: Path, kind: str, name: str) -> subprocess.Popen[bytes]:
    code = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))}
    environment.pop("DVC_STAGE", None)
    with (root / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vlp_models.cli.main", "stage", kind, name],
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _train(root: Path, kind: str, name: str) -> None:
    process = _start(root, kind, name)
    try:
        code = process.wait()
    except BaseException:
        _kill(process)
        raise
    if code:
        raise DataError(f"{kind} {name}: the short training failed with exit code {code}:\n{_log_tail(root)}")


def _train_and_kill(root: Path, kind: str, name: str) -> int:
    """Kill the training once it has saved a checkpoint; return the checkpoint's update."""
    process = _start(root, kind, name)
    try:
        while process.poll() is None:
            saved = sorted((root / ".work" / f"{kind}-{name}").glob("*/step-*.ckpt"))
            if saved:
                return int(saved[-1].stem.partition("-")[2])
            time.sleep(0.02)
    finally:
        _kill(process)
    raise DataError(f"{kind} {name}: the training ended before it could be killed; raise --steps:\n{_log_tail(root)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _log_tail(root: Path) -> str:
    return "\n".join((root / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-10:])


def _difference(one: Path, other: Path) -> str:
    """Describe how two files differ; "" if they are bitwise equal."""
    if not (one.exists() and other.exists()):
        return f"{one.name}: missing in one of them"
    if hash_file(one) == hash_file(other):
        return ""
    if one.suffix != ".safetensors":
        return f"{one.name}: differs"
    import numpy as np
    from safetensors.numpy import load_file

    a, b = load_file(one), load_file(other)
    unequal = [key for key in a if key not in b or a[key].tobytes() != b[key].tobytes()]
    largest = max((float(np.abs(a[k].astype(np.float64) - b[k]).max()) for k in unequal if k in b), default=0.0)
    return f"{one.name}: {len(unequal)} of {len(a)} tensors differ, by up to {largest:.3g}"
