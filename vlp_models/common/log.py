"""One logger for the package: stages log to stderr, only commands print to stdout."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from vlp_models.common.redaction import redact
from vlp_models.errors import plain_text

PACKAGE = "vlp_models"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`get_logger(__name__)`); every one is a child of the package's."""
    return logging.getLogger(name if name.split(".")[0] == PACKAGE else f"{PACKAGE}.{name}")


def configure_logging() -> None:
    """Send the package's log to stderr. Idempotent.

    VLP_LOG_LEVEL (default INFO) sets the level.
    """
    logger = logging.getLogger(PACKAGE)
    if logger.handlers:
        return
    logger.setLevel(os.environ.get("VLP_LOG_LEVEL", "INFO").upper())
    # Otherwise the root logger's handlers, such as Prefect's or MLflow's, print each line a second time.
    logger.propagate = False
    logger.addHandler(StderrHandler())


def announce_stop(text: str) -> None:
    """Write a line to stderr from a signal handler, which may have interrupted a print."""
    # Not print: a second call within an unfinished one raises a RuntimeError (reentrant call).
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes messages to the current `sys.stderr`, without secrets and Python's wording of system errors."""

    def __init__(self) -> None:
        # Not StreamHandler's: it assigns `stream`, which is a property here.
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        # Read for each record, because tests, notebooks and progress bars replace `sys.stderr`.
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        # No time stamp: log files and Prefect add their own.
        text = plain_text(redact(super().format(record)))
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text
