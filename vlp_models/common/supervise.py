"""Runs a command so that no death above it orphans it: `python -m vlp_models.common.supervise -- dvc repro pretrain`.

Prefect's worker kills a cancelled flow after 30 s, and DVC dies at once on a signal and leaves its trainer behind.
This small process stands between them. When it is told to stop (SIGTERM, SIGINT) or its parent dies, it interrupts
the command's whole process group, so that the trainer saves its state, waits `GRACE` seconds, and only then kills.
Should it be killed itself, the command gets a SIGTERM: a DVC that ends so takes its stage along (workspace/guard.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

GRACE = 20.0  # seconds; less than the 30 a Prefect worker waits. VLP_GRACE in the environment is another
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks Linux to send SIGTERM when the parent dies. Elsewhere a signal to this process is the only way to stop."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # died before the request was in place
        os.kill(os.getpid(), signal.SIGTERM)


def supervise(command: list[str], grace: float = GRACE, parent: int | None = None) -> int:
    """Runs `command` in a session of its own and returns its exit code, 128 + signal where a signal ended it.

    Args:
        parent: whose death ends it; the one who started this may be dead before it can look.
    """
    stop: list[int] = []

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    die_with_parent(os.getppid() if parent is None else parent)
    if stop:
        return 128 + stop[0]
    here = os.getpid()
    child = subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(here),  # this process has one thread
    )
    deadline: float | None = None
    while True:
        try:
            code = child.wait(timeout=0.2)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            pass
        if stop and deadline is None:
            deadline = time.monotonic() + grace
            _signal_group(child.pid, signal.SIGINT)
        if deadline is not None and time.monotonic() > deadline:
            _signal_group(child.pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def main() -> None:
    arguments, started_by = sys.argv[1:], None
    if arguments[:1] == ["--parent"]:
        started_by, arguments = int(arguments[1]), arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        sys.exit("usage: python -m vlp_models.common.supervise [--parent PID] -- COMMAND [ARGUMENT...]")
    sys.exit(supervise(arguments, float(os.environ.get("VLP_GRACE", GRACE)), started_by))


if __name__ == "__main__":
    main()
