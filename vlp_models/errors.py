"""Errors a user can act on.

Each message names the file (and the line or key, if there is one) and what to do. The command line prints only the
message and exits with `exit_code`; a traceback means a bug in this project.
"""

from __future__ import annotations

import errno


class VLPError(Exception):
    """Base of every error that the input causes, not the program."""

    exit_code = 2


class ParamsError(VLPError):
    """params.yaml holds an unknown key or a value of the wrong type."""


class DataError(VLPError):
    """Input data is missing, unreadable, or violates a rule that the run depends on."""


class BusyError(DataError):
    """Another process holds a lock; try again later."""


class CheckpointError(VLPError):
    """A checkpoint is damaged or belongs to another architecture."""


class MissingToolError(VLPError):
    """A program this step needs (java, git, ...) is not on this machine."""


class TrackingError(VLPError):
    """MLflow does not respond, and this step requires it."""

    exit_code = 69  # EX_UNAVAILABLE


class NonFiniteLossError(VLPError):
    """The loss is NaN or infinite; raised before the optimizer step; names the samples."""

    exit_code = 3


class ProcessLostError(VLPError):
    """Another process of a distributed training has exited. A rerun resumes from the last checkpoint."""

    exit_code = 75


class Preempted(SystemExit):
    """Training was asked to stop and has saved its state; a rerun resumes from there.

    Exits with 75 (EX_TEMPFAIL), never 0: DVC would record a half-trained result as complete.
    """

    def __init__(self) -> None:
        super().__init__(75)


class Terminated(SystemExit):
    """SIGTERM outside of training: unfinished outputs are removed on the way out; the exit code is 128 + 15."""

    def __init__(self) -> None:
        super().__init__(128 + 15)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether `error` was caused by a full disk, quota or file size limit, however a library reports it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        text = str(error)
        if any(f"os error {number})" in text for number in _DISK_FULL) or any(t in text for t in _DISK_FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# SQLite's, the C library's, torch's
_DISK_FULL_TEXTS = (
    "database or disk is full",
    "No space left on device",
    "File too large",
    "PytorchStreamWriter failed",
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)
