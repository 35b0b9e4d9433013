"""One flow at a time in a workspace: a lock file that the kernel lets go of when its holder dies.

The supervisor of a running command inherits the open file, so a flow that is killed keeps the next one out until its
trainer has saved.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK = Path(".work") / "flow.lock"


class WorkspaceHeld(RuntimeError):
    """Another flow works in this workspace; the text says which."""


@contextlib.contextmanager
def hold_workspace(root: Path, who: str, wait: float, log: Callable[[str], None]) -> Iterator[int]:
    """Holds the workspace; gives the lock's file descriptor, for `supervised(hold=...)`.

    Args:
        who: what the one who waits is told.
        wait: seconds to wait for another holder.

    Raises:
        WorkspaceHeld: another flow held it all that time.
    """
    path = root / LOCK
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline, told = time.monotonic() + wait, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise WorkspaceHeld(f"{_holder(path)} works in {root}; waited {wait:.0f} s for it") from None
                if not told:
                    log(f"waiting up to {wait:.0f} s: {_holder(path)} works in this workspace")
                    told = True
                time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))
        holder = {"who": who, "pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)  # never LOCK_UN: a supervisor that still lives must keep it


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"{holder['who']} (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError):
        return "another flow"
