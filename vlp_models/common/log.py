"""One logger for the package: stages log to stderr, only commands print to stdout."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

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
    level = os.environ.get("VLP_LOG_LEVEL", "INFO").upper()
    logger.setLevel(logging.getLevelNamesMapping().get(level, logging.INFO))
    # Otherwise the root logger's handlers, such as Prefect's or MLflow's, print each line a second time.
    logger.propagate = False
    logger.addHandler(StderrHandler())


def announce_stop(text: str) -> None:
    """Write a line to stderr from a signal handler, which may have interrupted a print."""
    # Not print: a second call within an unfinished one raises a RuntimeError (reentrant call).
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


class SteadyStream:
    """A text stream that no longer raises once its reader is gone, its terminal closed or its disk full.

    A training must not stop because its log has no reader: from then on, everything is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._steady():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._steady():
            self._stream.flush()

    @contextmanager
    def _steady(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Also for the rest of the buffer, which Python flushes at exit, and for processes started later.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady_output() -> None:
    """Let stdout and stderr take any character, as \\uNNNN where the encoding lacks it, and outlive their reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, SteadyStream(stream))


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
