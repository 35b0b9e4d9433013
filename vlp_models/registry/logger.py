"""A training run in MLflow: one run per piece of work, continued after a kill, never in training's way.

The log beside the run (training/log.py) is the truth; MLflow gets a copy of its lines. A server that can't be reached
costs a warning and a pause between attempts; what it missed is sent at the next attempt, by a rerun, or, when the run
has ended meanwhile, from where tracking/spool.py keeps it. Each line is there once: its metrics bear the time that the
line was written, and MLflow drops what it has already.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.lock import file_lock
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import DataError, TrackingError
from vlp_models.params import TrackingParams
from vlp_models.registry.client import connect, tracking_uri
from vlp_models.training.log import LOG, read_log

if TYPE_CHECKING:
    from mlflow import MlflowClient

# In the work directory: {"uri", "key": finds a run whose creation was not answered, "began": ms, "run_id",
# "params": whether they are there, "step": the last one sent}
STATE = "mlflow.json"
KEY = "vlp.run_key"  # the tag that holds it
PAUSE = 120.0  # seconds between attempts while the server can't be reached
METRICS_PER_REQUEST = 900  # MLflow takes 1,000
PARAMS_PER_REQUEST = 100
NOT_METRICS = ("step", "seconds", "time")
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
        inputs: Sequence[DataInput] = (),
    ) -> None:
        self.params = params
        self.root = root
        self._state_file = work / STATE
        self._name = name
        self._run_params = run_params
        self._tags = tags
        self._inputs = inputs
        self._uri = redact(tracking_uri(params, root))  # to tell of, and to know the server again by
        self._client: MlflowClient | None = None
        self._state = self._read_state()
        self._silent_until = 0.0
        self._warned = False

    def sync(self, log: Path) -> None:
        if time.monotonic() >= self._silent_until:
            self._try(lambda: self._send(log))

    def close(self, log: Path, status: Status, ended: int | None = None) -> bool:
        """Sends the rest and ends the run; whether MLflow has it all. Does nothing if no run was ever begun.

        Args:
            ended: when, in ms; default: now.
        """
        if not self._state["key"]:
            return True

        def finish() -> None:
            self._send(log)
            assert self._client is not None
            self._client.set_terminated(self._state["run_id"], status, end_time=ended)

        return self._try(finish)

    @property
    def record(self) -> dict[str, Any]:
        """What `from_record` makes the same run of."""
        inputs = [one.plain() for one in self._inputs]
        about = {"name": self._name, "run_params": self._run_params, "tags": self._tags, "inputs": inputs}
        return {**about, "state": self._state}

    @classmethod
    def from_record(cls, params: TrackingParams, root: Path, work: Path, record: dict[str, Any]) -> MLflowRun:
        about = {key: record[key] for key in ("name", "run_params", "tags")}
        inputs = [DataInput(**one) for one in record.get("inputs", [])]  # earlier versions kept none
        run = cls(params, root, work, **about, inputs=inputs)
        if not run._state["key"]:  # else its own state is newer
            run._state = record["state"]
        return run

    @property
    def key(self) -> str:
        return str(self._state["key"])

    @property
    def uri(self) -> str:
        return self._uri

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
                cause = error.__cause__ if isinstance(error, TrackingError) and error.__cause__ else error
                reason = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
                print(f"MLflow at {self._uri} does not answer ({redact(reason)}); training goes on", file=sys.stderr)
            return False

    def _send(self, log: Path) -> None:
        self._begin()
        client = self._connected()
        from mlflow.entities import Metric  # only now: `connect` sets what MLflow reads when it is imported

        pending: list[Metric] = []
        for row in read_log(log):
            if row["step"] <= self._state["step"]:
                continue
            written = int(row.get("time") or time.time() * 1000)
            new = [Metric(n, float(v), written, row["step"]) for n, v in row.items() if n not in NOT_METRICS]
            if len(pending) + len(new) > METRICS_PER_REQUEST:
                self._send_batch(client, pending)
                pending = []
            pending += new
        if pending:
            self._send_batch(client, pending)

    def _send_batch(self, client: MlflowClient, metrics: list[Any]) -> None:
        client.log_batch(self._state["run_id"], metrics=metrics)
        self._state["step"] = metrics[-1].step
        self._write_state()

    def _connected(self) -> MlflowClient:
        if self._client is not None:
            return self._client
        for key, value in TIMEOUTS.items():
            os.environ.setdefault(key, value)
        client = connect(self.params, self.root)
        if self._state["run_id"]:
            client.update_run(self._state["run_id"], status="RUNNING")
            self._state["step"] = max(self._state["step"], _last_step(client, self._state["run_id"]))
        else:
            self._state["run_id"] = self._create(client)
            self._write_state()
        if not self._state["params"]:
            self._log_params(client)
            log_inputs(client, self._state["run_id"], self._inputs)
            self._state["params"] = True
            self._write_state()
        self._client = client
        return client

    def _create(self, client: MlflowClient) -> str:
        """The id of a new run, or of the one that an attempt whose answer was lost has made."""
        experiment = client.get_experiment_by_name(self.params.experiment)
        assert experiment is not None
        found = client.search_runs([experiment.experiment_id], f"tags.`{KEY}` = '{self._state['key']}'")
        if found:
            return str(found[0].info.run_id)
        tags = {**self._tags, KEY: self._state["key"]}
        run = client.create_run(experiment.experiment_id, self._state["began"], tags, run_name=self._name)
        return str(run.info.run_id)

    def _log_params(self, client: MlflowClient) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in _flat(redacted(self._run_params)).items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(self._state["run_id"], params=params[start : start + PARAMS_PER_REQUEST])

    def _begin(self) -> None:
        """Before the first attempt: what makes a second one find what the first has made."""
        if not self._state["key"]:
            self._state |= {"key": uuid.uuid4().hex, "began": int(time.time() * 1000)}
            self._write_state()

    def _read_state(self) -> dict[str, Any]:
        fresh = {"uri": self._uri, "key": "", "began": 0, "run_id": "", "params": False, "step": 0}
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return fresh
        return state if fresh.keys() <= state.keys() and state["uri"] == self._uri else fresh

    def _write_state(self) -> None:
        partial = self._state_file.with_name(f".{STATE}.partial")
        partial.write_text(json.dumps(self._state), encoding="utf-8")
        partial.replace(self._state_file)


def _last_step(client: MlflowClient, run_id: str) -> int:
    """The last step that MLflow has: a kill can come between its answer and our note of it."""
    names = client.get_run(run_id).data.metrics
    name = "loss" if "loss" in names else next(iter(names), "")
    return max((int(metric.step) for metric in client.get_metric_history(run_id, name)), default=0) if name else 0


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; MLflow's params are strings."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(item)[:500]
    return flat


RUN = "run.json"


def _resend_directory(root: Path) -> Path:
    return root / ".work" / "mlflow"


@contextmanager
def tracked(run: MLflowRun | None, work: Path) -> Iterator[MLflowRun | None]:
    """Ends the run with the status that fits how the block ends."""
    log = work / LOG
    try:
        yield run
    except BaseException as error:
        if run is not None:
            stopped = isinstance(error, (SystemExit, KeyboardInterrupt))
            run.close(log, "KILLED" if stopped else "FAILED")  # if that fails: its state stays in `work`
        raise
    if run is not None:
        close_or_keep(run, log)


def close_or_keep(run: MLflowRun, log: Path) -> None:
    """Ends a finished run. If MLflow does not answer, keeps all it needs; if it does, sends what others have left."""
    place = _resend_directory(run.root) / run.key
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    ended = int(time.time() * 1000)
    if run.close(log, "FINISHED", ended):
        shutil.rmtree(place, ignore_errors=True)
        replay(run.params, run.root)
        return
    try:
        partial.mkdir(parents=True)
        shutil.copy(log, partial / LOG)
        (partial / RUN).write_text(json.dumps({**run.record, "ended": ended}), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(
        f"MLflow at {run.uri}: the run's numbers wait in {place}; the next training, `vlp run` or "
        "`vlp stage register` sends them",
        file=sys.stderr,
    )


def waiting(root: Path) -> list[Path]:
    """The runs that wait, in the order they ended."""
    return sorted(_resend_directory(root).glob(f"[!.]*/{RUN}"), key=lambda path: path.stat().st_mtime)


def replay(params: TrackingParams, root: Path) -> int:
    """Sends what waits for this MLflow; returns how many runs still wait. Never raises for MLflow's sake."""
    if not params.uri or not waiting(root):
        return 0
    try:
        with file_lock(root / ".work" / "mlflow.lock", "sending of metrics"):
            for path in waiting(root):
                place = path.parent
                try:
                    record = json.loads(path.read_text(encoding="utf-8"))
                    run = MLflowRun.from_record(params, root, place, record)
                    there = record["state"]["uri"]
                except (ValueError, KeyError, TypeError, AttributeError) as error:  # after a power cut
                    aside = place.rename(place.with_name(f".damaged-{place.name}"))
                    print(f"{path}: damaged ({error!r}), so its numbers can't be sent; now in {aside}", file=sys.stderr)
                    continue
                if there != run.uri:
                    continue
                if not run.close(place / LOG, "FINISHED", record["ended"]):
                    break
                shutil.rmtree(place)
                print(f"MLflow at {run.uri}: {record['name']}'s numbers, which waited, are there", file=sys.stderr)
    except DataError:  # another process is sending them
        pass
    return len(waiting(root))


def find_training_run(client: MlflowClient, report: Path) -> str:
    """The run's id; empty where MLflow does not have it (any more), or the training was not logged there.

    Args:
        report: what the training wrote of itself (reports/training/finetune/RUN.json).
    """
    try:
        key = str(json.loads(report.read_text(encoding="utf-8")).get("mlflow_key") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    if not key.isalnum():
        return ""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{KEY}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else ""


LONGEST_DIGEST = 36  # MLflow's limit


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """One dataset of one split.

    digest: of what tells one state of the data from another. uri: where it lies, from the project's root. counts: rows.
    """

    name: str
    context: Literal["training", "evaluation"]
    digest: str
    uri: str
    counts: dict[str, int]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DataInput]) -> None:
    """MLflow knows a dataset by name and digest: logging it again adds none."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if inputs:
        made = [
            DatasetInput(
                Dataset(
                    name=one.name,
                    digest=one.digest[:LONGEST_DIGEST],
                    source_type="local",
                    source=json.dumps({"uri": one.uri}),
                    profile=json.dumps(one.counts),
                ),
                [InputTag(key="mlflow.data.context", value=one.context)],
            )
            for one in inputs
        ]
        client.log_inputs(run_id, made)
