"""Errors a user can act on.

Each message names the file (and the line or key, where there is one) and the way out. The command line prints
the message alone and exits with `exit_code`; a traceback means a bug of ours.
"""

from __future__ import annotations


class VLPError(Exception):
    """Base of every error that is the input's fault, not the program's."""

    exit_code = 2


class ParamsError(VLPError):
    """params.yaml holds an unknown key or a value of the wrong type."""


class DataError(VLPError):
    """Input data is missing, unreadable or breaks a rule that the run can't go on without."""


class CheckpointError(VLPError):
    """A checkpoint is damaged or belongs to another architecture."""


class MissingToolError(VLPError):
    """A program this step needs (java, git, ...) is not on this machine."""


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
