"""Run a command so that it is not orphaned when a process above it dies.

    python -m vlp_models.common.supervise [--parent PID] -- dvc repro pretrain

Prefect's worker kills a canceled flow after 30 s, and DVC exits at once on a signal and leaves its trainer behind.
This small process runs between them. When it receives SIGTERM or SIGINT, or its parent dies, it interrupts the
command's whole process group, so that the trainer saves its state, waits `GRACE` seconds, then sends SIGKILL. If it
is killed itself, the command receives SIGTERM: DVC terminated this way terminates its stage too (pipeline/guard.py).

`start_supervised` starts one such process, `supervise_commands` one per command. `kill_stopped_descendants` ends
processes that others would wait for forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vlp_models.common.log import announce_stop, get_logger

GRACE = 20.0  # seconds; less than the 30 a Prefect worker waits. The environment variable VLP_GRACE overrides it
PR_SET_PDEATHSIG = 1
LOOK_EVERY, LOOKS = 10.0, 3  # a process that was stopped in so many looks in a row is killed

logger = get_logger(__name__)


def die_with_parent(parent: int) -> None:
    """Ask Linux to send SIGTERM when the parent dies. On other systems only a signal to this process stops it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # Without this check, a parent that dies between the fork and `prctl` sends no signal.
    if os.getppid() != parent:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGTERM)


def supervise(command: list[str], grace: float = GRACE, parent: int | None = None) -> int:
    """Run `command` in a session of its own; return its exit code, or 128 + signal if a signal ended it.

    Args:
        grace: seconds between the interrupt and the kill.
        parent: process whose death ends the command; default: this process's parent now. The starter passes its own
            pid, because it may be dead before this process can look.
    """
    # A handler may interrupt anything, so it only takes a note; the loop below acts on it.
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stop.append(received))
    die_with_parent(os.getppid() if parent is None else parent)
    if stop:
        return 128 + stop[0]
    supervisor = os.getpid()
    # A session of its own is a process group of its own: it can be signaled as a whole, DVC and trainers alike,
    # and Ctrl+C in a terminal reaches this process only, which passes it on once.
    child = subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(supervisor),  # safe: this process has one thread
    )
    threading.Thread(target=_report_stopped_descendants, daemon=True).start()
    deadline: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(timeout=0.2)
            # Popen returns -N after signal N; a shell returns 128 + N.
            return code if code >= 0 else 128 - code
        # Only the first signal starts the grace period: a second Ctrl+C must not cut a trainer's save.
        if stop and deadline is None:
            deadline = time.monotonic() + grace
            _signal_group(child.pid, signal.SIGINT)
        if deadline is not None and time.monotonic() > deadline:
            # Repeated until `wait` returns.
            _signal_group(child.pid, signal.SIGKILL)


def start_supervised(command: list[str], environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command under a supervisor that interrupts it if this process dies. options: of `subprocess.Popen`."""
    supervisor = [sys.executable, "-m", "vlp_models.common.supervise", "--parent", str(os.getpid()), "--"]
    return subprocess.Popen([*supervisor, *command], env=environment, **options)


def supervise_commands(commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int:
    """Run commands, each under a supervisor that passes on SIGINT and SIGTERM and gives a trainer time to save.

    Returns the first exit code that is not 0, or 128 plus the signal's number; no further command starts after it.
    """
    # Reversed, so that `pop` returns the commands in the order given.
    pending, running, code = list(reversed(commands)), list[subprocess.Popen[bytes]](), 0
    received: list[int] = []  # signals; the loop passes them on, so a process that is being started gets them, too
    passed_on = 0

    def stop(number: int, frame: object) -> None:
        if not received:
            announce_stop("stopping; a running stage ends first, and a training saves its state")
        received.append(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Fill free places, wait a moment, collect those that have ended; a failure stops what has not started.
        while running or (pending and not received):
            while pending and len(running) < at_once and not received:
                running.append(start_supervised(pending.pop(), environment))
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=0.2)
            for _ in received[passed_on:]:
                passed_on += 1
                for process in running:
                    process.terminate()
            # A copy, because the loop removes from the list.
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                code = code or process.returncode
                if code:
                    pending.clear()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # What was stopped ends as the shell has it, not with the 255 that DVC has for every stop.
    return 128 + received[0] if received else code


def kill_stopped_descendants() -> None:
    """Kill each process below this one that stays stopped (SIGSTOP) while this one runs; to be run in a thread.

    What waits for an answer of such a process would wait forever, but notices its death: a trainer that of a loader
    process or another rank, a stage that of a pool's member or a Java program.
    """
    for pid, name in _find_stopped_descendants(LOOKS):
        logger.warning("process %d (%s) was stopped by a signal and is killed", pid, name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _report_stopped_descendants() -> None:
    """Log which process stays stopped. A stage may be paused on purpose, so it is not killed."""
    # The stage has killed its own by then.
    for pid, name in _find_stopped_descendants(2 * LOOKS):
        logger.warning("process %d (%s) is stopped by a signal; `kill -CONT %d` continues it", pid, name, pid)


def _find_stopped_descendants(limit: int) -> Iterator[tuple[int, str]]:
    """Yield pid and name of each process below this one that is stopped in `limit` looks in a row; endless.

    Looks are counted, not seconds: if this process was stopped as well (Ctrl-Z), they continue together.
    """
    import psutil

    looks: Counter[psutil.Process] = Counter()
    while True:
        time.sleep(LOOK_EVERY)
        stopped = Counter[psutil.Process]()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if process.status() == psutil.STATUS_STOPPED:
                    stopped[process] = looks[process] + 1
                    if stopped[process] == limit:
                        yield process.pid, process.name()
        looks = stopped


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def main() -> None:
    arguments, parent = sys.argv[1:], None
    if arguments[:1] == ["--parent"]:
        parent, arguments = int(arguments[1]), arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        sys.exit("usage: python -m vlp_models.common.supervise [--parent PID] -- COMMAND [ARGUMENT...]")
    sys.exit(supervise(arguments, float(os.environ.get("VLP_GRACE", GRACE)), parent))


if __name__ == "__main__":
    main()
