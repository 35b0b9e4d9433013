"""One process at a time: a lock file that the kernel releases with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlp_models.errors import BusyError


@contextmanager
def exclusive(path: Path, what: str, patience: float = 0.0) -> Iterator[None]:
    """
    Args:
        what: for the message: what only one process may do here.
        patience: seconds to wait for another process to end.

    Raises:
        BusyError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + patience
        waited = False
        while not _taken(file.fileno()):
            file.seek(0)
            holder = f"process {file.read().strip() or 'unknown'}"
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"another {what} ({holder}) is at work in this workspace; wait for it, or stop it (a training "
                    "then saves its state), and run again"
                )
            if not waited:
                print(f"waiting for another {what} ({holder})", file=sys.stderr)
                waited = True
            time.sleep(0.2)
        with suppress(OSError):  # a full disk: who holds it is for people
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
