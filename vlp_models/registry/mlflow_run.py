"""Log a training run to MLflow: one MLflow run per training, resumed after a kill.

While MLflow is away, training continues (curve_loggers.py). Missing lines are sent at the next attempt, when the
training resumes, or, if the run has ended by then, from .work/mlflow/KEY by the next training, `vlp run` or `vlp stage
register`. Every step is logged once: metrics carry the time at which their line was written, and MLflow drops what it
already has.

A process that is killed cannot end its run: `end_dead_runs` does so for those whose stage runs no more.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import BusyError, TrackingError, first_line, network_reason
from vlp_models.params import TrackingParams, load_params
from vlp_models.registry.client import NOT_FOUND_CODES, connect, is_away, tracking_uri
from vlp_models.registry.curve_loggers import NOT_METRICS, CurveLogger, Status, flatten_params
from vlp_models.training.log import LOG

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = get_logger(__name__)

# In the training's work directory: {"uri", "key": finds a run whose creation was never confirmed, "began": ms,
# "run_id", "params": whether they are logged, "step": the last one sent, "status": of the run}
STATE = "mlflow.json"
RECORD = "run.json"  # in .work/mlflow/KEY, next to the log: what is needed to send the rest of a finished run
KEY_TAG = "vlp.run_key"  # tag of an MLflow run
RUNNING = "RUNNING"
METRICS_PER_REQUEST = 900  # MLflow accepts 1,000
PARAMS_PER_REQUEST = 100
MAX_DIGEST = 8  # characters, as in MLflow's own digests: its table of runs shows them
# A training step waits for these requests, so they give up earlier than others.
TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


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


class MLflowRun(CurveLogger):
    """A training's curve as an MLflow run, which the first `sync` creates."""

    _connection: MlflowClient | None

    def __init__(
        self,
        params: TrackingParams,
        root: Path,
        work: Path,
        *,
        title: str,
        run_params: dict[str, Any],
        tags: dict[str, str],
        inputs: Sequence[DataInput] = (),
    ) -> None:
        # Redacted also in the state file, so the two stay comparable.
        self.uri = redact(tracking_uri(params, root))  # for messages, and to recognize the server later
        new_state = {"uri": self.uri, "key": "", "began": 0, "run_id": "", "params": False, "step": 0}
        super().__init__(f"MLflow at {self.uri}", title, work / STATE, new_state)
        self.params, self.root = params, root
        self._run_params, self._tags, self._inputs = run_params, tags, inputs

    @property
    def key(self) -> str:
        """Return what identifies the run, also before MLflow has answered; empty until the first `sync`."""
        return str(self._state["key"])

    @property
    def refused(self) -> bool:
        """Return whether MLflow's last failure was an answer."""
        error = self.last_error
        return error is not None and not isinstance(error, TrackingError) and not is_away(error)

    def close(self, log: Path, status: Status, ended: int | None = None) -> bool:
        return not self.key or super().close(log, status, ended)

    def end_training(self, log: Path, status: Status) -> None:
        """End the run. If MLflow does not answer, keep what it needs; if it does, send what others have left."""
        if status != "FINISHED" or not self.key:  # if it fails, the state stays in `work` for the resumed training
            self.close(log, status)
            return
        folder = unsent_directory(self.root) / self.key
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        ended = int(time.time() * 1000)
        # Send the rest first: a record is needed only if that fails.
        if self.close(log, status, ended):
            shutil.rmtree(folder, ignore_errors=True)
            send_unsent(self.params, self.root)
            return
        # In a folder that gets its name when it is complete: a kill leaves no half record.
        settings = {"name": self.title, "run_params": self._run_params, "tags": self._tags}
        record = {**settings, "inputs": [asdict(dataset) for dataset in self._inputs], "state": self._state}
        try:
            partial.mkdir(parents=True)
            shutil.copy(log, partial / LOG)
            (partial / RECORD).write_text(json.dumps({**record, "ended": ended}), encoding="utf-8")
            # A record of an earlier attempt is older than this one.
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        logger.warning(
            "%s: the run's metrics are kept in %s; the next training, `vlp run` or `vlp stage register` sends them",
            self.name,
            folder,
        )

    def _explain(self, error: Exception) -> str:
        cause = error.__cause__ if isinstance(error, TrackingError) and error.__cause__ else error
        failure = "refused a request" if self.refused else "does not answer" if network_reason(cause) else "failed"
        return f"{self.name} {failure} ({redact(first_line(cause))[:200]})"

    def _send(self, log: Path) -> None:
        if not self.key:  # written before the first attempt, so that a second one finds the first one's run
            self._state |= {"key": uuid.uuid4().hex, "began": int(time.time() * 1000)}
            self._save_state()
        client = self._connect()
        from mlflow.entities import Metric  # after `connect`, which sets what MLflow reads at import

        # Whole rows per request, so that the state's step is exact after each.
        pending: list[Metric] = []
        for row in self._new_rows(log):
            written = int(row.get("time") or time.time() * 1000)
            # A metric per column of the row, at the row's step and time.
            metrics = [
                Metric(name, float(value), written, row["step"])
                for name, value in row.items()
                if name not in NOT_METRICS
            ]
            # Send before the request would be too large, so that no row is split.
            if len(pending) + len(metrics) > METRICS_PER_REQUEST:
                self._send_batch(client, pending)
                pending = []
            pending += metrics
        if pending:
            self._send_batch(client, pending)

    def _send_batch(self, client: MlflowClient, metrics: list[Any]) -> None:
        client.log_batch(self._state["run_id"], metrics=metrics)
        self._state["step"] = metrics[-1].step
        self._save_state()

    def _finish(self, status: Status, ended: int | None) -> None:
        self._connect().set_terminated(self._state["run_id"], status, end_time=ended)
        self._set_status(status)

    def _set_status(self, status: str) -> None:
        self._state["status"] = status
        self._save_state()

    def _connect(self) -> MlflowClient:
        """Return a client, with the run created or continued and its params logged."""
        if self._connection is not None:
            return self._connection
        # Before `connect`, which sets only those that are not set.
        for key, value in TIMEOUTS.items():
            os.environ.setdefault(key, value)
        client = connect(self.params, self.root)
        self._set_status(RUNNING)  # before MLflow has it: a kill in between leaves a run that is looked at for nothing
        if self._state["run_id"] and not self._reopen(client):  # deleted since: a new run gets everything
            self._state |= {"run_id": "", "params": False, "step": 0}
            self._save_state()
        if self._state["run_id"]:
            # A kill may come after MLflow's answer and before the state was written: ask MLflow for its last step.
            names = client.get_run(self._state["run_id"]).data.metrics
            # `loss` is a column of every row, so its history ends with the last step that was sent.
            name = "loss" if "loss" in names else next(iter(names), "")
            history = client.get_metric_history(self._state["run_id"], name) if name else []
            self._state["step"] = max([self._state["step"], *(int(metric.step) for metric in history)])
        else:
            # An attempt whose answer was lost may have created the run.
            experiment = client.get_experiment_by_name(self.params.experiment)
            # `connect` creates the experiment.
            assert experiment is not None
            runs = client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{self.key}'")
            if runs:
                run = runs[0]
                client.update_run(run.info.run_id, status=RUNNING)  # as killed, it may have been ended
            else:
                tags = {**self._tags, KEY_TAG: self.key}
                # Without its kind, a fine-tuning run's name fits into MLflow's table of runs.
                name = self.title.removeprefix("finetune@")
                run = client.create_run(experiment.experiment_id, self._state["began"], tags, run_name=name)
            self._state["run_id"] = str(run.info.run_id)
            self._save_state()
        # Params and inputs are flagged as logged only after the last request, so a kill repeats all of them.
        if not self._state["params"]:
            from mlflow.entities import Param

            # MLflow accepts a param again with the same value.
            params = [Param(key, value) for key, value in flatten_params(redacted(self._run_params)).items()]
            for start in range(0, len(params), PARAMS_PER_REQUEST):
                client.log_batch(self._state["run_id"], params=params[start : start + PARAMS_PER_REQUEST])
            log_inputs(client, self._state["run_id"], self._inputs)
            self._state["params"] = True
            self._save_state()
        self._connection = client
        return client

    def _reopen(self, client: MlflowClient) -> bool:
        """Continue the run; return whether it still exists."""
        from mlflow.exceptions import MlflowException

        try:
            client.update_run(self._state["run_id"], status=RUNNING)
        except MlflowException as error:
            if error.error_code not in NOT_FOUND_CODES:
                raise
            return False
        return True


def unsent_directory(root: Path) -> Path:
    return root / ".work" / "mlflow"


def unsent_runs(root: Path) -> list[Path]:
    """Return the records of finished runs that MLflow does not have yet, in the order in which they ended."""
    # `.NAME.partial` and `.damaged-NAME` are not records.
    return sorted(unsent_directory(root).glob(f"[!.]*/{RECORD}"), key=lambda path: path.stat().st_mtime)


def send_unsent(params: TrackingParams, root: Path) -> int:
    """Send the finished runs that are kept for this MLflow; return how many remain. Never raises because of MLflow."""
    if not params.uri or not unsent_runs(root):
        return 0
    try:
        # Without a wait: if another process is sending, there is nothing to do here.
        with file_lock(root / ".work" / "mlflow.lock", "process that sends metrics to MLflow"):
            for path in unsent_runs(root):
                folder = path.parent
                try:
                    record = json.loads(path.read_text(encoding="utf-8"))
                    run = MLflowRun(
                        params,
                        root,
                        folder,
                        title=record["name"],
                        run_params=record["run_params"],
                        tags=record["tags"],
                        inputs=[DataInput(**dataset) for dataset in record["inputs"]],
                    )
                    if not run.key:  # otherwise the state in the folder is newer
                        run._state = record["state"]
                    # The run's state is always one of this server; the record names the server that the run belongs to.
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
                logger.info("%s: sent the metrics of %s", run.name, run.title)
    except BusyError:  # another process is sending them
        pass
    return len(unsent_runs(root))


def end_dead_runs(root: Path) -> None:
    """End the MLflow runs whose process was killed, as KILLED when it last wrote. Never raises because of MLflow.

    A resumed training continues its run. Examined are .work/STAGE/*/mlflow.json, of trainings and of `register`.
    MLflow, which takes seconds to import, is only asked about those that may still be shown as running.
    """
    states = {file: read_json_or_none(file) for file in sorted((root / ".work").glob(f"*/*/{STATE}"))}
    may_run = [
        file
        for file, state in states.items()
        if file.parents[1] != unsent_directory(root)  # ended: `send_unsent`
        and isinstance(state, dict)
        and state.get("key")
        and state.get("status", RUNNING) == RUNNING
    ]
    client: MlflowClient | None = None
    for file in may_run:
        # Held until MLflow has answered, so that the stage does not continue the run at this moment.
        stage_lock = root / ".work" / "locks" / f"{file.parents[1].name}.lock"
        try:
            with file_lock(stage_lock, "check of ended stages"):
                params, state = load_params(root / "params.yaml").tracking, states[file]
                if not params.uri or state["uri"] != redact(tracking_uri(params, root)):  # another server's
                    continue
                client = client or connect(params, root)
                experiments = [experiment.experiment_id for experiment in client.search_experiments()]
                query = f"tags.`{state.get('tag', KEY_TAG)}` = '{state['key']}' and attributes.status = '{RUNNING}'"
                for run in client.search_runs(experiments, query):
                    written = max(path.stat().st_mtime for path in (file, file.with_name(LOG)) if path.exists())
                    client.set_terminated(run.info.run_id, "KILLED", end_time=int(written * 1000))
                    logger.info("MLflow: ended the run of %s, which was killed", run.info.run_name)
                write_json(file, state | {"status": "KILLED"})
        except BusyError:  # it is running
            continue
        except Exception as error:  # whatever MLflow raises: the next call ends them
            logger.info("the MLflow runs of killed trainings are not ended yet: %s", redact(first_line(error)))
            return


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
    # The key becomes part of a query, and the file may have been edited.
    if not key.isalnum():
        return ""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    return str(runs[0].info.run_id) if runs else ""


def log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DataInput]) -> None:
    """Log dataset inputs. MLflow identifies a dataset by name and digest: logging it again adds none."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = [
        DatasetInput(
            Dataset(
                name=dataset.name,
                digest=dataset.digest[:MAX_DIGEST],
                source_type="local",
                source=json.dumps({"uri": dataset.uri}),
                profile=json.dumps(dataset.counts),
            ),
            [InputTag(key="mlflow.data.context", value=dataset.context)],
        )
        for dataset in inputs
    ]
    if datasets:
        client.log_inputs(run_id, datasets)
