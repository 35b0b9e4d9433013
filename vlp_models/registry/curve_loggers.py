"""Copy a training's curve to MLflow, and to the sinks that `tracking.sinks` of params.yaml names (contrib/sinks).

The log next to the training state (training/log.py) is the truth. A curve logger gets a copy of its lines after each
checkpoint, as one run that a resumed training continues. It never stops the training: a failure is one warning, a pause
between attempts, and a count.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from vlp_models.common.io import write_json
from vlp_models.common.log import get_logger
from vlp_models.common.packages import PIP, is_installed
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import MissingToolError, first_line
from vlp_models.params import TrackingParams
from vlp_models.training.log import LOG, read_log

logger = get_logger(__name__)

SINKS = Table("sinks", {})  # name of the package -> `module:class` of its CurveLogger
PAUSE = 120.0  # seconds between attempts after a failure
NOT_METRICS = ("step", "seconds", "time")  # columns of the log

Status = Literal["FINISHED", "FAILED", "KILLED"]


class CurveLogger(ABC):
    """One copy of a training's curve.

    name: of the program, for messages. title: of the training. failures: how many attempts to send lines have failed.
    """

    def __init__(self, name: str, title: str, state_file: Path, new_state: dict[str, Any]) -> None:
        """
        Args:
            state_file: what survives a kill; another server's (`uri`) does not count.
            new_state: what it holds at first; `step`: the last step that was sent.
        """
        self.name, self.title, self.failures = name, title, 0
        self.last_error: Exception | None = None
        self._connection: Any = None
        self._paused_until = 0.0
        self._state_file, self._state = state_file, new_state
        with contextlib.suppress(OSError, ValueError, AttributeError):
            state = json.loads(state_file.read_text(encoding="utf-8"))
            # A state of an older program lacks keys; one of another server counts steps that this one does not have.
            if new_state.keys() <= state.keys() and state.get("uri") == new_state.get("uri"):
                self._state = state

    def sync(self, log: Path) -> None:
        """Send the new lines of `log`; within the pause after a failure, do nothing."""
        # `monotonic`: a change of the clock neither ends nor extends the pause.
        if time.monotonic() >= self._paused_until:
            self._attempt(lambda: self._send(log))

    def close(self, log: Path, status: Status, ended: int | None = None) -> bool:
        """Send the rest and end the run, if one was started; return whether everything was sent.

        Args:
            ended: end time in ms; default: now.
        """

        def send_and_finish() -> None:
            self._send(log)
            self._finish(status, ended)

        return self._attempt(send_and_finish)

    def end_training(self, log: Path, status: Status) -> None:
        """Close the run at the end of a training."""
        self.close(log, status)
        if self.failures:
            logger.warning("%s: %d attempts to send the curve of %s failed", self.name, self.failures, self.title)

    @abstractmethod
    def _send(self, log: Path) -> None:
        """Send the new rows; set `step` of the state as they are sent. Any error may be raised."""

    @abstractmethod
    def _finish(self, status: Status, ended: int | None) -> None:
        """End the run, if one was started."""

    def _explain(self, error: Exception) -> str:
        return f"{self.name}: {redact(first_line(error))[:200]}"

    def _new_rows(self, log: Path) -> list[dict[str, Any]]:
        return [row for row in read_log(log) if row["step"] > self._state["step"]]

    def _save_state(self) -> None:
        write_json(self._state_file, self._state)

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # startup messages
                action()
            return True
        # Whatever fails there (connection, lock, schema, full disk) is no reason to stop training.
        except Exception as error:
            self.failures += 1
            self.last_error = error
            # The connection may be what failed, so the next attempt makes a new one.
            self._connection = None
            self._paused_until = time.monotonic() + PAUSE
            # One warning per training; `end_training` reports the count.
            if self.failures == 1:
                logger.warning("%s; training continues", self._explain(error))
            return False


class CurveLoggers:
    """The curve loggers of one training, as the tracker of `training.run.fit`."""

    def __init__(self, loggers: Sequence[CurveLogger]) -> None:
        self.loggers = loggers

    def sync(self, log: Path) -> None:
        for curve_logger in self.loggers:
            curve_logger.sync(log)


@contextmanager
def log_curves(loggers: Sequence[CurveLogger], work: Path) -> Iterator[CurveLoggers]:
    """Yield the tracker of a training, and end the loggers' runs with the status that fits how the block ends.

    Args:
        work: the training's work directory, which has the log.
    """
    # Until the block has ended, any other exception means a failure.
    status: Status = "FAILED"
    try:
        yield CurveLoggers(loggers)
        status = "FINISHED"
    except (SystemExit, KeyboardInterrupt):  # the training stopped with its state saved
        status = "KILLED"
        raise
    finally:
        for curve_logger in loggers:
            curve_logger.end_training(work / LOG, status)


def open_sinks(
    params: TrackingParams, root: Path, work: Path, *, title: str, run_params: dict[str, Any]
) -> list[CurveLogger]:
    """Return the curve loggers of `tracking.sinks`.

    Args:
        title: of the training, `pretrain@RUN`. run_params: its settings, shown with the curve.

    Raises:
        MissingToolError: a sink's package is not installed.
    """
    check_sinks(params)
    config = flatten_params(redacted(run_params))
    return [import_target(SINKS[name])(name, title, params.experiment, root, work, config) for name in params.sinks]


def check_sinks(params: TrackingParams) -> None:
    """
    Raises:
        MissingToolError: the package of a sink is not installed.
    """
    for name in params.sinks:
        if not is_installed(name):
            raise MissingToolError(
                f"params.yaml: `tracking.sinks: {name}` needs the package {name}; run `{PIP} install {name}`, or "
                "remove it"
            )


def sink_state_files(work: Path) -> list[Path]:
    """Return where sinks store their state in a training's work directory."""
    return [work / f"{name}.json" for name in SINKS]


def flatten_params(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; MLflow's params are strings."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= flatten_params(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(item)[:500]
    return flat
