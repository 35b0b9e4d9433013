"""Run one command of the pipeline, or DVC, under the supervisor; pass its output on, and classify failures."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlp_models.common.environment import command_environment
from vlp_models.common.lock import HELD_LOCK, file_lock
from vlp_models.common.redaction import redact
from vlp_models.common.supervise import start_supervised
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.pipeline.dvc.consistency import clear_records
from vlp_models.pipeline.dvc.dvc_yaml import is_generated
from vlp_models.pipeline.dvc.repro import REPRO
from vlp_models.pipeline.dvc.stale import read_stale
from vlp_models.registry.mlflow_run import end_dead_runs

Log = Callable[[str], None]
UNAVAILABLE = os.EX_UNAVAILABLE  # MLflow does not respond to a stage that requires it
PREEMPTED = 75  # exit code of a trainer that was asked to stop and has saved its state
KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}  # exit codes as Python and as shells report it
BUSY = ("is busy", "Unable to acquire lock", "is using this workspace")  # two messages of DVC's, and file_lock's
MIN_FREE_DISK = 16 * 2**20  # bytes
TAIL = 20  # output lines quoted in errors
OUTPUT = ("part-", ".log")  # prefix and suffix of the file in .work with a running command's output
TERMINATION_SECONDS = 28  # a canceled flow has 30
_EXIT_CODE = re.compile(r"exited with (-?\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONNECTION = re.compile(
    r"connection (refused|reset|aborted|timed out)|connectionerror|max retries exceeded|read timed out"
    r"|name or service not known|temporary failure in name resolution|network is unreachable",
    re.IGNORECASE,
)


class StageFailed(RuntimeError):
    """A command of the pipeline failed; the message holds the end of its output."""


class PathLocked(StageFailed):
    """Another process has locked a path that the command needs."""


class Preempted(StageFailed):
    """A trainer was asked to stop and has saved its state."""


class Killed(StageFailed):
    """A process of the command was killed, for example for lack of memory; a trainer resumes from its checkpoint."""


class Unreachable(StageFailed):
    """A server (MLflow, a remote) did not respond."""


class TimedOut(StageFailed):
    """The part took longer than `flow.timeout_hours` allows and was interrupted."""


class WorkspaceInUse(RuntimeError):
    """Another flow, or `vlp run`, is using this workspace; the message names it."""


WORTH_A_RETRY = (PathLocked, Preempted, Killed, Unreachable)


@dataclass(frozen=True)
class CommandResult:
    """Exit code of a command, and the last `TAIL` lines of its output."""

    code: int
    lines: list[str]


def outlive_worker() -> None:
    """Let this flow continue after its Prefect worker, which reads stdout and stderr through pipes, is killed.

    Without a reader, the next line of output would fail, and Prefect's console handler ends the flow then (rich's
    `on_broken_pipe`). So hold the pipes open for reading as well, and empty them once the worker is gone. Prefect's
    server still gets the log. Only on Linux, and only in a flow that a worker started: `head` may end what it reads.
    """
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return
    for descriptor in (1, 2):
        # Only pipes have a reader that can go away; a terminal or a file has none.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            with contextlib.suppress(FileNotFoundError):  # no /proc
                pipe = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                threading.Thread(target=_empty_orphaned_pipe, args=(pipe, os.getppid()), daemon=True).start()


def _empty_orphaned_pipe(pipe: int, worker: int) -> None:
    """Read a pipe to its end once the worker that should read it is gone."""
    # When the parent dies, the process gets another one, such as init.
    while os.getppid() == worker:
        time.sleep(1)
    # Until the end of the pipe, so that writers never meet a full one.
    while os.read(pipe, 65536):
        pass


@contextmanager
def hold_workspace(root: Path, name: str, wait: float, log: Log) -> Iterator[int]:
    """Hold the workspace for one flow; yield the lock's file descriptor for `run_supervised(lock_fd=...)`.

    The supervisor of a running command inherits the descriptor, so that a flow that is killed keeps the next one out
    until its trainer has saved its state. So the output files that are here at the start are left by killed flows;
    delete them. MLflow's runs of killed trainings are ended before and after.

    Args:
        name: name of the flow, for the message of another one.
        wait: seconds to wait for another flow, or for `vlp run`, which holds the same lock.

    Raises:
        WorkspaceInUse: timed out waiting.
    """
    lock = Workspace(root).lock
    with file_lock(lock, f"flow {name}", wait=wait, on_wait=log, busy=WorkspaceInUse) as descriptor:
        # The lock is held, so no command of a live flow writes these files.
        for output in lock.parent.glob("*".join(OUTPUT)):
            output.unlink(missing_ok=True)
        end_dead_runs(root)
        try:
            yield descriptor
        finally:
            end_dead_runs(root)


def run_supervised(
    root: Path,
    command: list[str],
    log: Log,
    *,
    accept: tuple[int, ...] = (0,),
    timeout: float = 0,
    lock_fd: int | None = None,
) -> CommandResult:
    """Run `command` in `root` and pass its output to `log` line by line.

    Use a file, not a pipe: if the flow dies, the trainer's prints must not fail while it saves.

    Args:
        accept: exit codes that are an answer, not a failure.
        timeout: seconds after which the command is interrupted; 0: never.
        lock_fd: a file descriptor (the workspace's lock) that stays open until the command has ended, even if this
            process is killed.

    Raises:
        PathLocked, Preempted, Killed, Unreachable: worth a retry.
        TimedOut: the command was interrupted.
        StageFailed: any other exit code.
    """
    env = {**command_environment(keep_order=True), "PYTHONUNBUFFERED": "1"}
    # The command below must not wait for the lock that this flow holds.
    if lock_fd is not None:
        env[HELD_LOCK] = os.fspath(Workspace(root).lock.resolve())
    (root / ".work").mkdir(exist_ok=True)
    prefix, suffix = OUTPUT
    # `delete=False`: the command writes to the file, and `_follow` reads it, after this handle is closed.
    with tempfile.NamedTemporaryFile("w", dir=root / ".work", prefix=prefix, suffix=suffix, delete=False) as output:
        process = start_supervised(
            command,
            env,
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # With the descriptor the supervisor holds the workspace's lock, whatever happens to this process.
            pass_fds=() if lock_fd is None else (lock_fd,),
        )
    # Only the last lines are kept in memory.
    path, tail = Path(output.name), deque[str](maxlen=TAIL)
    try:
        is_late = _follow(process, path, log, tail, timeout)
    except BaseException:
        # The flow itself is being ended: let the supervisor give the trainer time to save.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TERMINATION_SECONDS)
            path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)
    # In messages a command is called as users know it.
    if command[: len(REPRO)] == REPRO:
        command = ["dvc", "repro", *command[len(REPRO) :]]
    name = " ".join(command[2:] if command[:2] == [sys.executable, "-m"] else command)
    if is_late:
        raise TimedOut(f"{name} was interrupted after {timeout:.0f} s (flow.timeout_hours):\n" + "\n".join(tail))
    if process.returncode not in accept:
        raise _explain_failure(name, process.returncode, list(tail), root)
    return CommandResult(process.returncode, list(tail))


def _follow(process: subprocess.Popen[bytes], path: Path, log: Log, tail: deque[str], timeout: float) -> bool:
    """Pass a process's output on until it has ended; return whether it was interrupted for taking too long."""
    # `timeout` 0 becomes infinity, which never passes.
    deadline, is_late = time.monotonic() + (timeout or math.inf), False
    with path.open(errors="replace") as source:
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The pause between looks at the file: `wait` returns early if the process ends.
                code = process.wait(0.5)
            for line in source:  # also after the process has ended: it may have written since the last look
                text = redact(_ANSI.sub("", line).rstrip())
                if text:
                    log(text)
                    tail.append(text)
            # Once: from here on the supervisor kills the command after its grace period, and the loop waits for it.
            if code is None and not is_late and time.monotonic() > deadline:
                is_late = True
                log(f"interrupted after {timeout:.0f} s (flow.timeout_hours)")
                process.terminate()
    return is_late


def _explain_failure(name: str, code: int, lines: list[str], root: Path) -> StageFailed:
    """Return the error of a command that failed, with the end of its output."""
    # DVC's own exit code is 255 for every exit code of a stage; its message has the stage's.
    # `exited with 75` in DVC's message names the code of the stage.
    codes = {code, *(int(number) for line in lines for number in _EXIT_CODE.findall(line))}
    if os.EX_IOERR in codes or shutil.disk_usage(root).free < MIN_FREE_DISK:  # it may have had no room to report it
        lines = [*lines, "the disk is full: free some space, then run again; finished stages are kept"]
    text = "\n".join(lines)
    kind = StageFailed
    if any(words in text for words in BUSY):
        kind = PathLocked
    elif PREEMPTED in codes:
        kind = Preempted
    elif codes & KILLED:
        kind = Killed
    elif UNAVAILABLE in codes or _CONNECTION.search(text):
        kind = Unreachable
    return kind(f"{name} exited with code {code}:\n{text}")


def is_stale(root: Path, targets: list[str]) -> bool:
    """Return whether `dvc status` reports changes in the targets or their dependencies; default: in any stage."""
    try:
        return bool(read_stale(root, targets))
    # Counts as stale, so that `dvc repro` reports the reason.
    except DataError:
        return True


def update_dvc_yaml(root: Path, log: Log, *, lock_fd: int | None = None) -> None:
    """Write dvc.yaml from params.yaml, unless it is written by hand."""
    if is_generated(root):
        run_supervised(root, ["vlp", "plan"], log, lock_fd=lock_fd)


def repro(root: Path, targets: list[str], log: Log, *, timeout: float = 0, lock_fd: int | None = None) -> bool:
    """Run `dvc repro targets`; return whether a stage ran, or was restored from the run cache."""
    changed = False

    def watch(line: str) -> None:
        nonlocal changed
        # The run cache restores outputs that an earlier run made from the same inputs.
        changed = changed or line.startswith("Running stage") or "is cached - skipping run" in line
        log(line)

    # Records of stages whose DVC was killed belong to an earlier run.
    clear_records(root)
    run_supervised(root, [*REPRO, *targets], watch, timeout=timeout, lock_fd=lock_fd)
    return changed
