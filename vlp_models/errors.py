"""Errors a user can act on.

Each message names the file (and the line or key, where there is one) and the way out. The command line prints
the message alone and exits with `exit_code`; a traceback means a bug of ours.
"""

from __future__ import annotations

import errno


class VLPError(Exception):
    """Base of every error that is the input's fault, not the program's."""

    exit_code = 2


class ParamsError(VLPError):
    """params.yaml holds an unknown key or a value of the wrong type."""


class DataError(VLPError):
    """Input data is missing, unreadable or breaks a rule that the run can't go on without."""


class BusyError(DataError):
    """Another process is at work where only one may be; later it can be done."""


class CheckpointError(VLPError):
    """A checkpoint is damaged or belongs to another architecture."""


class MissingToolError(VLPError):
    """A program this step needs (java, git, ...) is not on this machine."""


class TrackingError(VLPError):
    """MLflow does not answer, and this step can't do without."""

    exit_code = 69  # EX_UNAVAILABLE


class NonFiniteLossError(VLPError):
    """The loss is NaN or infinite; raised before the optimiser step, names the samples."""

    exit_code = 3


class ProcessLostError(VLPError):
    """Another process of a training over several has ended. A rerun goes on from the last checkpoint."""

    exit_code = 75


class Preempted(SystemExit):
    """Training was told to stop and has saved its state; a rerun goes on from there.

    Exits with 75 (EX_TEMPFAIL), never 0: DVC would record a half-trained result as complete.
    """

    def __init__(self) -> None:
        super().__init__(75)


class Terminated(SystemExit):
    """SIGTERM, outside of training: unfinished outputs are removed on the way out, and the exit code says so."""

    def __init__(self) -> None:
        super().__init__(128 + 15)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, quota or file size limit is behind `error`, in whatever words a library reports it."""
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
