"""Show training curves in Weights & Biases and Trackio, next to MLflow: `tracking.sinks` of params.yaml.

A sink gets the lines of the training's log that MLflow gets, after each checkpoint, as a run of its own that a resumed
training continues. It never stops the training: an error is one warning, a pause, and a count in the training report.
Nothing leaves the machine unless the environment allows it: W&B is offline without WANDB_API_KEY or WANDB_MODE.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_json
from vlp_models.common.log import get_logger
from vlp_models.common.packages import is_installed
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import MissingToolError, first_line
from vlp_models.params import TrackingParams
from vlp_models.registry.logger import NOT_METRICS, PAUSE, MLflowRun, flatten_params
from vlp_models.training.log import LOG, read_log

logger = get_logger(__name__)

# Nothing but the curve is sent: no code, no console output, no crash reports, no usage statistics.
ENVIRONMENT = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_SILENT": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


def check_sinks(params: TrackingParams) -> None:
    """
    Raises:
        MissingToolError: the package of a sink is not installed.
    """
    for kind in params.sinks:
        if not is_installed(kind):
            raise MissingToolError(
                f"params.yaml: `tracking.sinks: {kind}` needs the package {kind}; run `uv pip install {kind}`, or "
                "remove it"
            )


class Sink:
    """One run in W&B or Trackio. failures: how many attempts to send lines have failed."""

    def __init__(
        self, kind: str, params: TrackingParams, root: Path, work: Path, *, name: str, run_params: dict[str, Any]
    ) -> None:
        self.kind, self.name, self.failures = kind, name, 0
        self._project, self._folder, self._state_file = params.experiment, root / ".work" / kind, work / f"{kind}.json"
        self._config = flatten_params(redacted(run_params))
        self._state = self._read_state()
        self._run: Any = None
        self._silent_until = 0.0

    def sync(self, log: Path) -> None:
        """Send the new lines of `log`; within the pause after a failure, do nothing."""
        if time.monotonic() >= self._silent_until:
            self._try(lambda: self._send(log))

    def close(self, log: Path, exit_code: int) -> None:
        """Send the rest and end the run."""
        self._try(lambda: self._send(log))
        if self._run is not None:
            self._try(lambda: self._finish(exit_code))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # their startup messages
                action()
        except Exception as error:  # whatever fails there is no reason to stop training
            self.failures += 1
            self._run = None
            self._silent_until = time.monotonic() + PAUSE
            if self.failures == 1:
                logger.warning("%s: %s; training continues", self.kind, redact(first_line(error))[:200])

    def _send(self, log: Path) -> None:
        rows = [row for row in read_log(log) if row["step"] > self._state["step"]]
        if not rows:
            return
        if self._run is None:
            self._run = START[self.kind](self._project, self.name, self._state["id"], self._config, self._folder)
        try:
            for row in rows:
                numbers = {name: float(value) for name, value in row.items() if name not in NOT_METRICS}
                self._run.log(numbers, step=row["step"])
                self._state["step"] = row["step"]
        finally:
            write_json(self._state_file, self._state)

    def _finish(self, exit_code: int) -> None:
        if self.kind == "wandb":
            self._run.finish(exit_code=exit_code)
        else:
            import trackio

            trackio.finish()  # `run.finish` would be called again, and print, when the process ends

    def _read_state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
            return {"id": str(state["id"]), "step": int(state["step"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {"id": uuid.uuid4().hex[:12], "step": 0}


def _start_wandb(project: str, name: str, run_id: str, config: dict[str, str], folder: Path) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    settings = wandb.Settings(console="off", silent=True, init_timeout=20, x_disable_stats=True, x_disable_meta=True)
    return wandb.init(
        project=project,
        name=name,
        id=run_id,
        resume="allow" if mode == "online" else None,
        config=config,
        dir=folder,
        mode=mode,
        settings=settings,
    )


def _start_trackio(project: str, name: str, run_id: str, config: dict[str, str], folder: Path) -> Any:
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))  # read at import
    import trackio

    return trackio.init(project=project, name=f"{name}-{run_id}".replace("/", "-"), config=config, resume="allow")


START: dict[str, Callable[..., Any]] = {"wandb": _start_wandb, "trackio": _start_trackio}


class Trackers:
    """The trackers of one training: an MLflow run, if any, and the sinks."""

    def __init__(self, mlflow: MLflowRun | None, sinks: Sequence[Sink]) -> None:
        self.mlflow, self.sinks = mlflow, sinks

    @property
    def key(self) -> str:
        """Return the key of the MLflow run; empty without one."""
        return self.mlflow.key if self.mlflow is not None else ""

    @property
    def failures(self) -> dict[str, int]:
        """Return sink -> how many attempts to send lines have failed, of those with any."""
        return {sink.kind: sink.failures for sink in self.sinks if sink.failures}

    def sync(self, log: Path) -> None:
        for tracker in (self.mlflow, *self.sinks):
            if tracker is not None:
                tracker.sync(log)


@contextmanager
def open_sinks(
    params: TrackingParams, root: Path, work: Path, *, name: str, run_params: dict[str, Any]
) -> Iterator[list[Sink]]:
    """Yield the sinks of params.yaml, and end their runs when the block ends.

    Raises:
        MissingToolError: see `check_sinks`.
    """
    check_sinks(params)
    for key, value in ENVIRONMENT.items() if params.sinks else ():
        os.environ.setdefault(key, value)
    sinks = [Sink(kind, params, root, work, name=name, run_params=run_params) for kind in params.sinks]
    code = 1
    try:
        yield sinks
        code = 0
    finally:
        for sink in sinks:
            sink.close(work / LOG, code)
            if sink.failures:
                logger.warning("%s: %d attempts to send the curve of %s failed", sink.kind, sink.failures, name)
