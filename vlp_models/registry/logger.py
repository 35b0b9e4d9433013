"""Log a training run to MLflow: one MLflow run per training, resumed after a kill, never in training's way.

The log next to the training state (training/log.py) is the truth; MLflow gets a copy of its lines. While MLflow is
away, training continues with one warning and a pause between attempts. Missing lines are sent at the next attempt, when
the training resumes, or, if the run has ended by then, from .work/mlflow/KEY by the next training, `vlp run` or
`vlp stage register`. Every step is logged once: metrics carry the time at which their line was written, and MLflow
drops what it already has.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.io import write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import BusyError, TrackingError, first_line
from vlp_models.params import TrackingParams
from vlp_models.registry.client import NOT_FOUND_CODES, connect, is_away, tracking_uri
from vlp_models.training.log import LOG, read_log

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = get_logger(__name__)

# In the training's work directory: {"uri", "key": finds a run whose creation was never confirmed, "began": ms,
# "run_id", "params": whether they are logged, "step": the last one sent}
STATE = "mlflow.json"
RECORD = "run.json"  # in .work/mlflow/KEY, next to the log: what is needed to send the rest of a finished run
KEY_TAG = "vlp.run_key"  # tag of an MLflow run
PAUSE = 120.0  # seconds between attempts while the server is away
METRICS_PER_REQUEST = 900  # MLflow accepts 1,000
PARAMS_PER_REQUEST = 100
MAX_DIGEST = 36  # MLflow's limit, in characters
NOT_METRICS = ("step", "seconds", "time")
# A training step waits for these requests, so they give up earlier than others.
TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """One dataset of one split, as MLflow's dataset input.

    digest: hash of the data's state. uri: its path from the project root. counts: rows.
    """

    name: str
    context: Literal["training", "evaluation"]
    digest: str
    uri: str
    counts: dict[str, int]


class MLflowRun:
    """The tracker of `training.run.fit`; it creates its MLflow run at the first `sync`."""

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
        self.name = name
        self.uri = redact(tracking_uri(params, root))  # for messages, and to recognize the server later
        self._state_file = work / STATE
        self._run_params = run_params
        self._tags = tags
        self._inputs = inputs
        self._client: MlflowClient | None = None
        self._state = self._read_state()
        self._silent_until = 0.0
        self._warned = False
        self.refused = False  # whether MLflow's last failure was an answer

    @property
    def key(self) -> str:
        return str(self._state["key"])

    @property
    def record(self) -> dict[str, Any]:
        """Return what `from_record` needs to continue this run in another process."""
        inputs = [asdict(one) for one in self._inputs]
        settings = {"name": self.name, "run_params": self._run_params, "tags": self._tags, "inputs": inputs}
        return {**settings, "state": self._state}

    @classmethod
    def from_record(cls, params: TrackingParams, root: Path, work: Path, record: dict[str, Any]) -> MLflowRun:
        settings = {key: record[key] for key in ("name", "run_params", "tags")}
        inputs = [DataInput(**one) for one in record["inputs"]]
        run = cls(params, root, work, **settings, inputs=inputs)
        if not run._state["key"]:  # otherwise the state in `work` is newer
            run._state = record["state"]
        return run

    def sync(self, log: Path) -> None:
        """Send the new lines of `log`; within the pause after a failure, do nothing."""
        if time.monotonic() >= self._silent_until:
            self._try(lambda: self._send(log))

    def close(self, log: Path, status: Status, ended: int | None = None) -> bool:
        """Send the rest and end the run; return whether MLflow has everything. Do nothing if no run was started.

        Args:
            ended: end time in ms; default: now.
        """
        if not self._state["key"]:
            return True

        def finish() -> None:
            self._send(log)
            assert self._client is not None
            self._client.set_terminated(self._state["run_id"], status, end_time=ended)

        return self._try(finish)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        # Whatever fails there (connection, lock, schema, full disk) is no reason to stop training.
        except Exception as error:
            self._client = None
            self.refused = not isinstance(error, TrackingError) and not is_away(error)
            self._silent_until = time.monotonic() + PAUSE
            if not self._warned:
                self._warned = True
                cause = error.__cause__ if isinstance(error, TrackingError) and error.__cause__ else error
                reason = redact(first_line(cause))[:200]
                what = "refused a request" if self.refused else "does not answer"
                logger.warning("MLflow at %s %s (%s); training continues", self.uri, what, reason)
            return False

    def _send(self, log: Path) -> None:
        if not self._state["key"]:  # written before the first attempt, so that a second one finds the first one's run
            self._state |= {"key": uuid.uuid4().hex, "began": int(time.time() * 1000)}
            self._write_state()
        client = self._connected()
        from mlflow.entities import Metric  # after `connect`, which sets what MLflow reads at import

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
        if self._state["run_id"] and not self._reopen(client):  # deleted since: a new run gets everything
            self._state |= {"run_id": "", "params": False, "step": 0}
            self._write_state()
        if self._state["run_id"]:
            # A kill may come after MLflow's answer and before the state was written: ask MLflow for its last step.
            names = client.get_run(self._state["run_id"]).data.metrics
            name = "loss" if "loss" in names else next(iter(names), "")
            history = client.get_metric_history(self._state["run_id"], name) if name else []
            self._state["step"] = max([self._state["step"], *(int(metric.step) for metric in history)])
        else:
            self._state["run_id"] = self._create_run(client)
            self._write_state()
        if not self._state["params"]:
            self._log_params(client)
            log_inputs(client, self._state["run_id"], self._inputs)
            self._state["params"] = True
            self._write_state()
        self._client = client
        return client

    def _reopen(self, client: MlflowClient) -> bool:
        """Continue the run; return whether it still exists."""
        from mlflow.exceptions import MlflowException

        try:
            client.update_run(self._state["run_id"], status="RUNNING")
        except MlflowException as error:
            if error.error_code not in NOT_FOUND_CODES:
                raise
            return False
        return True

    def _create_run(self, client: MlflowClient) -> str:
        """Return the id of a new run, or of the one that an attempt whose answer was lost has created."""
        experiment = client.get_experiment_by_name(self.params.experiment)
        assert experiment is not None
        found = client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{self._state['key']}'")
        if found:
            return str(found[0].info.run_id)
        tags = {**self._tags, KEY_TAG: self._state["key"]}
        run = client.create_run(experiment.experiment_id, self._state["began"], tags, run_name=self.name)
        return str(run.info.run_id)

    def _log_params(self, client: MlflowClient) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten_params(redacted(self._run_params)).items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(self._state["run_id"], params=params[start : start + PARAMS_PER_REQUEST])

    def _read_state(self) -> dict[str, Any]:
        fresh = {"uri": self.uri, "key": "", "began": 0, "run_id": "", "params": False, "step": 0}
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return fresh
        return state if fresh.keys() <= state.keys() and state["uri"] == self.uri else fresh

    def _write_state(self) -> None:
        write_json(self._state_file, self._state)


def flatten_params(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; MLflow's params are strings."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= flatten_params(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(item)[:500]
    return flat


@contextmanager
def track_training(run: MLflowRun | None, work: Path) -> Iterator[MLflowRun | None]:
    """End the MLflow run with the status that fits how the block ends."""
    log = work / LOG
    try:
        yield run
    except BaseException as error:
        if run is not None:
            stopped = isinstance(error, (SystemExit, KeyboardInterrupt))
            run.close(log, "KILLED" if stopped else "FAILED")  # if this fails, the state stays in `work`
        raise
    if run is not None:
        _finish(run, log)


def unsent_directory(root: Path) -> Path:
    return root / ".work" / "mlflow"


def unsent_runs(root: Path) -> list[Path]:
    """Return the records of finished runs that MLflow does not have yet, in the order in which they ended."""
    return sorted(unsent_directory(root).glob(f"[!.]*/{RECORD}"), key=lambda path: path.stat().st_mtime)


def _finish(run: MLflowRun, log: Path) -> None:
    """End a finished run. If MLflow does not answer, keep what it needs; if it does, send what others have left."""
    if not run.key:  # nothing was logged; its folder would be that of all unsent runs
        return
    folder = unsent_directory(run.root) / run.key
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    ended = int(time.time() * 1000)
    if run.close(log, "FINISHED", ended):
        shutil.rmtree(folder, ignore_errors=True)
        send_unsent(run.params, run.root)
        return
    try:
        partial.mkdir(parents=True)
        shutil.copy(log, partial / LOG)
        (partial / RECORD).write_text(json.dumps({**run.record, "ended": ended}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.warning(
        "MLflow at %s: the run's metrics are kept in %s; the next training, `vlp run` or `vlp stage register` sends "
        "them",
        run.uri,
        folder,
    )


def send_unsent(params: TrackingParams, root: Path) -> int:
    """Send the finished runs that are kept for this MLflow; return how many remain. Never raises because of MLflow."""
    if not params.uri or not unsent_runs(root):
        return 0
    try:
        with file_lock(root / ".work" / "mlflow.lock", "process that sends metrics to MLflow"):
            for path in unsent_runs(root):
                folder = path.parent
                try:
                    record = json.loads(path.read_text(encoding="utf-8"))
                    run = MLflowRun.from_record(params, root, folder, record)
                    uri, ended = record["state"]["uri"], record["ended"]
                except (ValueError, KeyError, TypeError, AttributeError) as error:  # after a power cut
                    aside = folder.rename(folder.with_name(f".damaged-{folder.name}"))
                    logger.warning("%s: damaged (%r), its metrics cannot be sent; moved to %s", path, error, aside)
                    continue
                if uri != run.uri:  # they belong to another server
                    continue
                if not run.close(folder / LOG, "FINISHED", ended):
                    if run.refused:  # it answers: perhaps it takes the others
                        continue
                    break
                shutil.rmtree(folder)
                logger.info("MLflow at %s: sent the metrics of %s", run.uri, record["name"])
    except BusyError:  # another process is sending them
        pass
    return len(unsent_runs(root))


def find_training_run(client: MlflowClient, report: Path) -> str:
    """Return the id of the MLflow run of a training: its curve is there, and its scores are logged there.

    Empty if MLflow does not have the run, or the training was not logged.

    Args:
        report: what the training wrote about itself (reports/training/finetune/RUN.json).
    """
    try:
        key = str(json.loads(report.read_text(encoding="utf-8")).get("mlflow_key") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    if not key.isalnum():
        return ""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else ""


def log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DataInput]) -> None:
    """Log dataset inputs. MLflow identifies a dataset by name and digest: logging it again adds none."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = [
        DatasetInput(
            Dataset(
                name=one.name,
                digest=one.digest[:MAX_DIGEST],
                source_type="local",
                source=json.dumps({"uri": one.uri}),
                profile=json.dumps(one.counts),
            ),
            [InputTag(key="mlflow.data.context", value=one.context)],
        )
        for one in inputs
    ]
    if datasets:
        client.log_inputs(run_id, datasets)
