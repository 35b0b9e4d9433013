"""DVC as a flow sees it: bring targets up to date, ask what is stale, clear the way beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PREEMPTED = 75  # a trainer that was told to stop has saved its state and exits with this


class StageFailed(RuntimeError):
    """`dvc repro` failed; the text holds the end of its output."""


class WorkspaceBusy(StageFailed):
    """Another DVC process holds the workspace; worth a retry."""


def environment() -> dict[str, str]:
    """The environment of a stage: `vlp` beside this interpreter, every tool's telemetry off."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "DVC_NO_ANALYTICS": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONUNBUFFERED": "1",
    }


def preflight(root: Path) -> list[str]:
    """Removes what a killed DVC can leave behind: an empty rwlock stops every later command. Returns what it did."""
    lock = root / ".dvc" / "tmp" / "rwlock"
    if not lock.exists() or _dvc_is_running(root):
        return []
    try:
        json.loads(lock.read_text() or "broken")
        return []
    except json.JSONDecodeError:
        lock.unlink()
        return [f"removed a damaged {lock.relative_to(root)}: no DVC process is alive"]


def is_stale(root: Path, targets: list[str]) -> bool:
    """Whether `dvc status` reports a change for any of the targets or what they depend on."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json", "--with-deps", *targets],
        cwd=root,
        env=environment(),
        capture_output=True,
        text=True,
    )
    try:
        return done.returncode != 0 or json.loads(done.stdout) != {}
    except json.JSONDecodeError:
        return True


def repro(root: Path, targets: list[str], log: Callable[[str], None]) -> None:
    """`dvc repro targets`, supervised, its output passed to `log` line by line.

    The output goes through a file: with a pipe, a dead flow would break the trainer's print in the middle of saving.

    Raises:
        WorkspaceBusy: another DVC process holds a path this one needs.
        StageFailed: anything else that ends with a non-zero exit code.
    """
    command = [sys.executable, "-m", "flows.supervise", "--", sys.executable, "-m", "dvc", "repro", *targets]
    env = environment()
    env["PYTHONPATH"] = f"{Path(__file__).parent.parent}{os.pathsep}{env.get('PYTHONPATH', '')}"
    (root / ".work").mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=root / ".work", prefix="dvc-", suffix=".log", delete=False) as sink:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=sink, stderr=subprocess.STDOUT)
    path = Path(sink.name)
    tail: list[str] = []
    try:
        with path.open(errors="replace") as source:
            while True:
                code = process.poll()
                for line in source:
                    text = line.rstrip()
                    if text:
                        log(text)
                        tail = [*tail[-19:], text]
                if code is not None:
                    break
                time.sleep(1.0)
    except BaseException:
        # The flow is being ended: let the supervisor give the trainer time to save.
        process.terminate()
        process.wait(timeout=29)
        raise
    path.unlink(missing_ok=True)
    if code:
        message = f"dvc repro {' '.join(targets)} ended with {code}:\n" + "\n".join(tail)
        raise (WorkspaceBusy if any("is busy" in line for line in tail) else StageFailed)(message)


def _dvc_is_running(root: Path) -> bool:
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if "dvc" in " ".join(command[:4]) and process.info["cwd"] == str(root):
            return True
    return False
