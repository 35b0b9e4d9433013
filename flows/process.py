"""Runs one command of the pipeline under the supervisor, passes its output on, and tells failures apart."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlp_models.common.redaction import redact

UNAVAILABLE = os.EX_UNAVAILABLE  # MLflow does not answer a stage that can't do without
PREEMPTED = 75  # a trainer that was told to stop has saved its state and exits with this
BUSY = ("is busy", "Unable to acquire lock", "is at work in this workspace")  # DVC's two ways to say it, and a stage's
NO_ROOM = 16 * 2**20  # bytes
TAIL = 20  # lines of output that a failure carries
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONNECTION = re.compile(
    r"connection (refused|reset|aborted|timed out)|connectionerror|max retries exceeded|read timed out"
    r"|name or service not known|temporary failure in name resolution|network is unreachable",
    re.IGNORECASE,
)


class StageFailed(RuntimeError):
    """A command of the pipeline failed; the text holds the end of its output."""


class WorkspaceBusy(StageFailed):
    """Another DVC process holds a path this one needs."""


class Preempted(StageFailed):
    """A trainer was told to stop and has saved its state."""


class Unreachable(StageFailed):
    """A server (MLflow, a remote) did not answer."""


class TimedOut(StageFailed):
    """The part took longer than `flow.timeout_hours` allows; it was interrupted."""


WORTH_A_RETRY = (WorkspaceBusy, Preempted, Unreachable)


@dataclass(frozen=True)
class Ended:
    """How a command ended; `lines` are the last `TAIL` of its output."""

    code: int
    lines: list[str]


def environment() -> dict[str, str]:
    """The environment of a command: `vlp` of this interpreter on the PATH, every tool's telemetry off."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    return {
        **os.environ,
        "PATH": path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}",
        "DVC_NO_ANALYTICS": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONUNBUFFERED": "1",
    }


def supervised(
    root: Path,
    command: list[str],
    log: Callable[[str], None],
    *,
    accept: tuple[int, ...] = (0,),
    timeout: float = 0,
    hold: int | None = None,
) -> Ended:
    """Runs `command` in `root`, its output passed to `log` line by line.

    The output goes through a file: with a pipe, a dead flow would break the trainer's print in the middle of saving.

    Args:
        accept: exit codes that are an answer and no failure.
        timeout: seconds after which it is interrupted; 0: none.
        hold: a file descriptor (the workspace's lock) that stays open until the command has ended, even if this
            process is killed.

    Raises:
        WorkspaceBusy, Preempted, Unreachable: waiting may mend it.
        TimedOut: it was interrupted.
        StageFailed: any other exit code.
    """
    env = environment()
    env["PYTHONPATH"] = f"{Path(__file__).parent.parent}{os.pathsep}{env.get('PYTHONPATH', '')}"
    (root / ".work").mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=root / ".work", prefix="part-", suffix=".log", delete=False) as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.supervise", "--parent", str(os.getpid()), "--", *command],
            cwd=root,
            env=env,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=() if hold is None else (hold,),
        )
    path, tail = Path(sink.name), deque[str](maxlen=TAIL)
    deadline, late = time.monotonic() + timeout if timeout else None, False
    try:
        with path.open(errors="replace") as source:
            while True:
                code = _wait(process, 0.5)
                for line in source:
                    text = redact(_ANSI.sub("", line).rstrip())
                    if text:
                        log(text)
                        tail.append(text)
                if code is not None:
                    break
                if deadline is not None and not late and time.monotonic() > deadline:
                    late = True
                    log(f"interrupted after {timeout:.0f} s, as flow.timeout_hours says")
                    process.terminate()
    except BaseException:
        # The flow is being ended: let the supervisor give the trainer time to save.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=28)
        raise
    path.unlink(missing_ok=True)
    lines = list(tail)
    if late:
        raise TimedOut(f"{_name(command)} was interrupted after {timeout:.0f} s (flow.timeout_hours):\n" + _text(lines))
    if code not in accept:
        full = code == os.EX_IOERR or any(f"exited with {os.EX_IOERR}" in line for line in lines)
        if full or shutil.disk_usage(root).free < NO_ROOM:  # it may have had no room to say so
            lines.append("the disk is full: make room, then run again; nothing finished is lost")
        raise _failure(code, lines)(f"{_name(command)} ended with {code}:\n" + _text(lines))
    return Ended(code, lines)


def _failure(code: int, lines: list[str]) -> type[StageFailed]:
    text = "\n".join(lines)
    if any(words in text for words in BUSY):
        return WorkspaceBusy
    # DVC's own exit code is 255 whatever the stage's was.
    if code == PREEMPTED or f"exited with {PREEMPTED}" in text:
        return Preempted
    if code == UNAVAILABLE or f"exited with {UNAVAILABLE}" in text or _CONNECTION.search(text):
        return Unreachable
    return StageFailed


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _name(command: list[str]) -> str:
    return " ".join(command[2:] if command[:2] == [sys.executable, "-m"] else command)


def _text(lines: list[str]) -> str:
    return "\n".join(lines)
