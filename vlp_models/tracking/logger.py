"""A training run in MLflow: one run per piece of work, continued after a kill, never in training's way.

The log beside the run (training/curve.py) is the truth; MLflow gets a copy of its lines. A server that can't be reached
costs a warning and a pause between attempts; what it missed is sent at the next attempt, at the latest by a rerun.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.errors import Preempted
from vlp_models.params import TrackingParams
from vlp_models.tracking.client import connect, tracking_uri
from vlp_models.training.curve import LOG, read_log

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATE = "mlflow.json"  # in the work directory: {"uri", "run_id", "step": the last one sent}
PAUSE = 120.0  # seconds between attempts while the server can't be reached
METRICS_PER_REQUEST = 900  # MLflow takes 1,000
# A training step waits for these: shorter than elsewhere.
TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}

Status = Literal["FINISHED", "FAILED", "KILLED"]


class MLflowRun:
    """What `training.run.fit` takes for a tracker. Creates its run at the first `sync`."""

    def __init__(
        self,
        params: TrackingParams,
        root: Path,
        work: Path,
        *,
        name: str,
        run_params: dict[str, Any],
        tags: dict[str, str],
    ) -> None:
        self._params = params
        self._root = root
        self._state_file = work / STATE
        self._name = name
        self._run_params = run_params
        self._tags = tags
        self._uri = tracking_uri(params, root)
        self._client: MlflowClient | None = None
        self._state = self._read_state()
        self._silent_until = 0.0
        self._warned = False

    def sync(self, log: Path) -> None:
        if time.monotonic() >= self._silent_until:
            self._try(lambda: self._send(log))

    def close(self, log: Path, status: Status) -> None:
        """Sends the rest and ends the run. Does nothing if no run was ever begun."""
        if not self._state.get("run_id") and not self._warned:
            return

        def finish() -> None:
            self._send(log)
            assert self._client is not None
            self._client.set_terminated(self._state["run_id"], status)

        if not self._try(finish):
            print(f"MLflow at {self._uri}: the run's numbers stay in {log}", file=sys.stderr)

    def _try(self, action: Any) -> bool:
        try:
            action()
            return True
        # Whatever goes wrong there (connection, lock, schema, full disk) is no reason to stop training.
        except Exception as error:
            self._client = None
            self._silent_until = time.monotonic() + PAUSE
            if not self._warned:
                self._warned = True
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                print(f"MLflow at {self._uri} does not answer ({reason}); training goes on", file=sys.stderr)
            return False

    def _send(self, log: Path) -> None:
        client = self._connected()
        from mlflow.entities import Metric  # only now: `connect` sets what MLflow reads when it is imported

        rows = [row for row in read_log(log) if row["step"] > self._state["step"]]
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, row["step"])
            for row in rows
            for name, value in row.items()
            if name not in ("step", "seconds")
        ]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            client.log_batch(self._state["run_id"], metrics=metrics[start : start + METRICS_PER_REQUEST])
        if rows:
            self._state["step"] = rows[-1]["step"]
            self._write_state()

    def _connected(self) -> MlflowClient:
        if self._client is not None:
            return self._client
        for key, value in TIMEOUTS.items():
            os.environ.setdefault(key, value)
        client = connect(self._params, self._root)
        if self._state.get("run_id"):
            client.update_run(self._state["run_id"], status="RUNNING")
        else:
            experiment = client.get_experiment_by_name(self._params.experiment)
            assert experiment is not None
            run = client.create_run(experiment.experiment_id, run_name=self._name, tags=self._tags)
            self._state = {"uri": self._uri, "run_id": run.info.run_id, "step": 0}
            self._write_state()
            for key, value in _flat(self._run_params).items():
                client.log_param(run.info.run_id, key, value)
        self._client = client
        return client

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            state = {}
        return state if state.get("uri") == self._uri else {"uri": self._uri, "run_id": "", "step": 0}

    def _write_state(self) -> None:
        partial = self._state_file.with_name(f".{STATE}.partial")
        partial.write_text(json.dumps(self._state), encoding="utf-8")
        partial.replace(self._state_file)


@contextmanager
def tracked(run: MLflowRun | None, work: Path) -> Iterator[MLflowRun | None]:
    """Ends the run with the status that fits how the block ends."""
    log = work / LOG
    try:
        yield run
    except BaseException as error:
        if run is not None:
            run.close(log, "KILLED" if isinstance(error, Preempted) else "FAILED")
        raise
    if run is not None:
        run.close(log, "FINISHED")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; MLflow's params are strings."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(item)[:500]
    return flat
