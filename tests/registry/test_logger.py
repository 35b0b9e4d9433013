"""A training run in MLflow: each step once whatever happens, and never in training's way."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from vlp_models.errors import Preempted
from vlp_models.params import TrackingParams
from vlp_models.registry.client import connect
from vlp_models.registry.logger import STATE, MLflowRun, tracked
from vlp_models.training.log import LOG


@pytest.fixture(autouse=True)
def no_tracking_uri_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow keeps the last URI in the environment of the process, where it outranks params.yaml."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


def params(uri: str = "sqlite:///mlflow.db") -> TrackingParams:
    return TrackingParams(uri=uri, artifacts="artifacts", experiment="toy", model_prefix="toy", metric={})


def run_in(root: Path, uri: str = "sqlite:///mlflow.db") -> MLflowRun:
    return MLflowRun(params(uri), root, root, name="pretrain", run_params={"a": {"b": 1}}, tags={"stage": "pretrain"})


def append(log: Path, *steps: int) -> None:
    with log.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "epoch": 1, "loss": float(step), "seconds": 0.1}) + "\n")


def test_one_run_with_each_step_once_over_a_preemption(tmp_path: Path) -> None:
    log = tmp_path / LOG
    with pytest.raises(Preempted), tracked(run_in(tmp_path), tmp_path) as first:
        assert first is not None
        append(log, 1, 2)
        first.sync(log)
        append(log, 3)
        raise Preempted
    client = connect(params(), tmp_path)
    experiment = client.get_experiment_by_name("toy")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    assert run.data.params == {"a.b": "1"}

    with tracked(run_in(tmp_path), tmp_path) as second:
        assert second is not None
        second.sync(log)
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        append(log, 4)
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_killed_between_the_answer_and_the_note_of_it_no_step_is_there_twice(tmp_path: Path) -> None:
    log = tmp_path / LOG
    first = run_in(tmp_path)
    append(log, 1, 2)
    first.sync(log)
    note = (tmp_path / STATE).read_bytes()
    append(log, 3, 4)
    first.sync(log)
    (tmp_path / STATE).write_bytes(note)  # as if the note of 3 and 4 had never been written
    append(log, 5)
    run_in(tmp_path).sync(log)
    client = connect(params(), tmp_path)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4, 5]


def test_a_server_that_does_not_answer_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = tmp_path / LOG
    append(log, 1)
    start = time.monotonic()
    with tracked(run_in(tmp_path, f"http://127.0.0.1:{port}"), tmp_path) as run:
        assert run is not None
        run.sync(log)
        run.sync(log)  # within the pause: not tried again
    assert time.monotonic() - start < 30
    said = capsys.readouterr().err
    assert said.count("does not answer") == 1
    (waits,) = (tmp_path / ".work" / "mlflow").iterdir()
    assert str(waits) in said
    assert (waits / LOG).read_text() == log.read_text()
