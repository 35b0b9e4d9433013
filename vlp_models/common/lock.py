"""One process at a time: a lock file that the kernel releases when its holder exits, however it exits."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlp_models.common.log import get_logger
from vlp_models.errors import BusyError, DataError

logger = get_logger(__name__)

PROBE = 0.05  # seconds that `find_holder` may hold a free lock, at most
HELD_LOCK = "VLP_HELD_LOCK"  # environment variable of a command: the lock file that the process above it holds


@contextmanager
def file_lock(
    path: Path,
    holder: str,
    *,
    wait: float = 0.0,
    on_wait: Callable[[str], None] = logger.info,
    announce_after: float = 0.0,
    busy: type[Exception] = BusyError,
) -> Iterator[int]:
    """Hold an exclusive lock on `path`; yield its file descriptor.

    The lock is never released by hand: a child process that inherits the descriptor (`pass_fds`) keeps it until it
    exits, even if this process is killed.

    Args:
        path: the lock file; it is created and stays, and names its holder, for messages.
        holder: the name of this process in messages, e.g. "`vlp run`".
        wait: seconds to wait for another holder.
        on_wait: called once with a message if there is a wait of more than `announce_after` seconds.
        busy: the exception to raise.

    Raises:
        BusyError (or `busy`): another process held the lock all that time.
        DataError: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # No O_TRUNC: until the lock is acquired, the file names the current holder, whom the messages below name.
    # O_CLOEXEC: only a child process started with `pass_fds` inherits the descriptor, and with it the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # A free lock may be busy for a moment, while `find_holder` looks at it.
        deadline, announced = time.monotonic() + max(wait, PROBE), False
        while not try_lock(descriptor, path):
            if time.monotonic() >= deadline:
                raise busy(
                    f"another {_read_holder(path, holder)} is using this workspace; wait for it to finish or stop it "
                    "(training saves its state first), then run again"
                )
            # `deadline - wait` is when the wait started.
            if not announced and time.monotonic() >= deadline - wait + announce_after:
                on_wait(f"waiting up to {wait:,.0f} s for another {_read_holder(path, holder)}")
                announced = True
            time.sleep(min(0.2, max(0.01, deadline - time.monotonic())))
        with suppress(OSError):  # a full disk: the holder's name is only for messages
            os.ftruncate(descriptor, 0)
            record = {"pid": os.getpid(), "host": socket.gethostname(), "what": holder}
            os.pwrite(descriptor, json.dumps(record).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)  # not LOCK_UN: a child that inherited the descriptor must keep the lock


def find_holder(path: Path) -> str:
    """Return who holds the lock, such as `flow retrain (pid 7)`; empty if it is free, or that cannot be determined."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        # A shared lock: several processes may look at once, and closing the descriptor releases it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path, "process")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return ""


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file without waiting; return whether that worked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # the number depends on the file system
        raise DataError(explain_no_locks(path, "flock", error)) from None
    return True


def explain_no_locks(path: Path, call: str, error: OSError) -> str:
    """Return the message for a file system without locks."""
    return (
        f"{path}: the file system has no file locks ({call}: {os.strerror(error.errno or 0).lower()}), without which "
        "two runs would overwrite each other. Move the project to a local disk, or mount the file system with locks "
        "(Lustre: option `flock`; NFS: `local_lock=all` if one machine uses it)"
    )


def _read_holder(path: Path, default: str) -> str:
    # The holder may be writing the file at this moment, so it may be empty or cut.
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        host = "" if holder["host"] == socket.gethostname() else f" on {holder['host']}"
        return f"{holder['what']} (pid {holder['pid']}{host})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{default} (pid unknown)"
