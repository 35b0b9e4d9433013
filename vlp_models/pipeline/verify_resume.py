"""`vlp verify-resume`: one of the project's trainings for a few updates, whole, and once more, killed and resumed.

Both in folders of their own below .work, with the project's data and the checkpoint that the run starts from; what they
come to is compared bit by bit. The kill is SIGKILL, as soon as there is something to go on from.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, read_yaml, split_start
from vlp_models.params.schema import nearest

EVERY = 2  # updates between two points to go on from
FOLDER = "verify-resume-"
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
class Resumed:
    """killed_at: the update that the killed training had saved last. differ: files that differ, each with how."""

    run: str
    steps: int
    killed_at: int
    files: int
    differ: list[str] = field(default_factory=list)


def verify_resume(params: Params, workspace: Workspace, run: str = "", steps: int = 6) -> Resumed:
    """
    Args:
        run: `pretrain/NAME` or `finetune/NAME`; default: the first of params.yaml.
        steps: updates of the short training.

    Raises:
        ParamsError: no such run, or too few updates to be killed in between.
        DataError: the data or the checkpoint that it starts from are not here; the training fails, or ends before it
            can be killed.
    """
    known = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
    run = run or next(iter(known), "")
    if run not in known:
        raise ParamsError(f"{run or 'params.yaml'}: no such run{nearest(run, known)}; there are: {', '.join(known)}")
    if steps <= EVERY:
        raise ParamsError(f"--steps: more than {EVERY}, or nothing is left to resume")
    kind, name = split_start(run)
    start = params.start_of(kind, name)
    require_output(workspace.shards, "shards")
    require_output(workspace.tokenizer, "tokenizer")
    if start:
        require_output(workspace.checkpoint(start), start.replace("/", "@", 1))
    (workspace.root / ".work").mkdir(exist_ok=True)
    for left in (workspace.root / ".work").glob(f"{FOLDER}*"):  # after a kill of this command itself
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=workspace.root / ".work", prefix=FOLDER) as temporary:
        folders = (Path(temporary) / "whole", Path(temporary) / "killed")
        whole, killed = (_prepared(folder, workspace, kind, name, start, steps) for folder in folders)
        _train(whole, kind, name)
        killed_at = _train_and_kill(killed, kind, name)
        _train(killed, kind, name)
        made = [Workspace(root).checkpoint(run) for root in (whole, killed)]
        files = sorted({path.relative_to(folder) for folder in made for path in folder.rglob("*") if path.is_file()})
        differ = [said for file in files if (said := _difference(made[0] / file, made[1] / file))]
    return Resumed(run=run, steps=steps, killed_at=killed_at, files=len(files), differ=differ)


def _prepared(root: Path, workspace: Workspace, kind: str, name: str, start: str | None, steps: int) -> Path:
    """A folder with the project's params, but for a short training and no MLflow, and with links to its data."""
    import yaml

    root.mkdir()
    raw: dict[str, Any] = read_yaml(str(workspace.root / "params.yaml"))
    raw[kind][name] = {**(raw[kind][name] or {}), "max_steps": steps}
    raw["trainer"] = {**(raw.get("trainer") or {}), "checkpoint_every_steps": EVERY, "log_every_steps": 1}
    raw["tracking"] = {**(raw.get("tracking") or {}), "uri": ""}
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    for path in (*DATA, *([f"checkpoints/{start}"] if start else [])):
        there = workspace.root / path
        if there.exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(there.absolute())
    return root


def _start(root: Path, kind: str, name: str) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
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
        raise DataError(f"{kind} {name}: the short training failed with exit code {code}:\n{_last_words(root)}")


def _train_and_kill(root: Path, kind: str, name: str) -> int:
    """Kills the training once it has saved; the update that it had saved."""
    process = _start(root, kind, name)
    try:
        while process.poll() is None:
            saved = sorted((root / ".work" / f"{kind}-{name}").glob("*/step-*.ckpt"))
            if saved:
                return int(saved[-1].stem.partition("-")[2])
            time.sleep(0.02)
    finally:
        _kill(process)
    raise DataError(
        f"{kind} {name}: the training that was to be killed ended by itself; give it more --steps:\n{_last_words(root)}"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(root: Path) -> str:
    return "\n".join((root / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-10:])


def _difference(one: Path, other: Path) -> str:
    """In words; empty where both are the same to the last bit."""
    if not (one.exists() and other.exists()):
        return f"{one.name}: only one of them has it"
    if hash_file(one) == hash_file(other):
        return ""
    if one.suffix != ".safetensors":
        return f"{one.name}: differs"
    import numpy as np
    from safetensors.numpy import load_file

    a, b = load_file(one), load_file(other)
    unlike = [key for key in a if key not in b or a[key].tobytes() != b[key].tobytes()]
    most = max((float(np.abs(a[k].astype(np.float64) - b[k]).max()) for k in unlike if k in b), default=0.0)
    return f"{one.name}: {len(unlike)} of {len(a)} tensors differ, by up to {most:.3g}"
