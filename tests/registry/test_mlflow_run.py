"""A training run in MLflow: every step once, whatever is killed, and never in training's way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from vlp_models.common.lock import find_holder
from vlp_models.errors import Preempted
from vlp_models.params import TrackingParams, load_params, to_plain
from vlp_models.registry import curve_loggers, mlflow_run
from vlp_models.registry.client import connect
from vlp_models.registry.curve_loggers import log_curves
from vlp_models.registry.mlflow_run import (
    RECORD,
    STATE,
    MLflowRun,
    end_dead_runs,
    send_unsent,
    unsent_directory,
    unsent_runs,
)
from vlp_models.training.log import LOG

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_tracking_uri")


def make_params(uri: str = "sqlite:///mlflow.db") -> TrackingParams:
    return TrackingParams(uri=uri, artifacts="artifacts", experiment="toy", model_prefix="toy", metric={})


def make_run(
    root: Path,
    uri: str = "sqlite:///mlflow.db",
    work: Path | None = None,
    run_params: Mapping[str, Any] = MappingProxyType({"a": {"b": 1}}),
) -> MLflowRun:
    settings: dict[str, Any] = {"run_params": dict(run_params), "tags": {"stage": "pretrain"}}
    return MLflowRun(make_params(uri), root, work or root, title="pretrain", **settings)


def append(log: Path, *steps: int) -> None:
    with log.open("a") as file:
        for step in steps:
            row = {"step": step, "epoch": 1, "loss": 1 / step, "seconds": 0.1, "time": 1_700_000_000_000 + step}
            file.write(json.dumps(row) + "\n")


def test_preempted_training_is_one_run_with_every_step_once(tmp_path: Path) -> None:
    log = tmp_path / LOG
    with pytest.raises(Preempted), log_curves([make_run(tmp_path)], tmp_path) as first:
        append(log, 1, 2)
        first.sync(log)
        append(log, 3)
        raise Preempted
    client = connect(make_params(), tmp_path)
    experiment = client.get_experiment_by_name("toy")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    assert run.data.params == {"a.b": "1"}

    with log_curves([make_run(tmp_path)], tmp_path) as second:
        second.sync(log)
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        append(log, 4)
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id == run.info.run_id
    assert again.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(step, 1 / step) for step in range(1, 5)]


def test_run_that_logged_nothing_leaves_unsent_runs_in_place(tmp_path: Path) -> None:
    record = unsent_directory(tmp_path) / "0123" / RECORD
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    with log_curves([make_run(tmp_path)], tmp_path):
        pass
    assert record.read_text() == "{}"


@pytest.mark.slow
def test_a_run_deleted_in_mlflow_is_sent_again_and_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / LOG
    first = make_run(tmp_path)
    append(log, 1, 2)
    first.sync(log)
    client = connect(make_params(), tmp_path)
    experiment = client.get_experiment_by_name("toy").experiment_id
    (run,) = client.search_runs([experiment])
    client.delete_run(run.info.run_id)
    append(log, 3)
    make_run(tmp_path).sync(log)
    (again,) = client.search_runs([experiment])
    assert again.info.run_id != run.info.run_id
    assert [m.step for m in client.get_metric_history(again.info.run_id, "loss")] == [1, 2, 3]

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_run, "connect", away)
        for name in ("a", "b"):  # MLflow is away when both end, and then refuses the first one's params
            work = tmp_path / name
            work.mkdir()
            append(work / LOG, 1)
            run = make_run(tmp_path, work=work, run_params={"k" * 300: 1} if name == "a" else {"a": 1})
            with log_curves([run], work) as ending:
                ending.sync(work / LOG)
    assert send_unsent(make_params(), tmp_path) == 1, "the refused one is kept"
    found = client.search_runs([experiment])
    assert "1" in [run.data.params.get("a") for run in found]


def away(*_: object) -> None:
    raise ConnectionError("nobody answers")


@pytest.mark.slow
@pytest.mark.parametrize("state_is_lost", [False, True], ids=["", "killed before MLflow's answer"])
def test_a_killed_training_is_not_shown_as_running(
    state_is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = to_plain(load_params(ROOT / "params.yaml")) | {"tracking": asdict(make_params())}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    work, lock = tmp_path / ".work" / "pretrain-toy" / "0123", tmp_path / ".work" / "locks" / "pretrain-toy.lock"
    for folder in (work, lock.parent):
        folder.mkdir(parents=True)
    append(work / LOG, 1, 2)
    client = connect(make_params(), tmp_path)
    experiment = client.get_experiment_by_name("toy").experiment_id

    def status() -> str:
        (run,) = client.search_runs([experiment])
        return str(run.info.status)

    # The stage's lock is what its process holds as long as it lives.
    with subprocess.Popen(["flock", "--no-fork", lock, "sleep", "60"]) as stage:
        while not find_holder(lock):
            time.sleep(0.01)
        make_run(tmp_path, work=work).sync(work / LOG)
        end_dead_runs(tmp_path)
        assert status() == "RUNNING"
        stage.kill()
    if state_is_lost:
        state = json.loads((work / STATE).read_text())
        (work / STATE).write_text(json.dumps(state | {"run_id": "", "step": 0}))
    last_written = int((work / STATE).stat().st_mtime * 1000)
    end_dead_runs(tmp_path)
    (run,) = client.search_runs([experiment])
    assert run.info.status == "KILLED" and run.info.end_time == last_written
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_run, "connect", None)  # MLflow is not asked again
        end_dead_runs(tmp_path)

    resumed = make_run(tmp_path, work=work)
    append(work / LOG, 3)
    resumed.sync(work / LOG)
    assert status() == "RUNNING"
    assert resumed.close(work / LOG, "FINISHED") and status() == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3]


@pytest.mark.slow
def test_kill_between_the_answer_and_the_state_file_sends_no_step_twice(tmp_path: Path) -> None:
    log = tmp_path / LOG
    first = make_run(tmp_path)
    append(log, 1, 2)
    first.sync(log)
    state = (tmp_path / STATE).read_bytes()
    append(log, 3, 4)
    first.sync(log)
    (tmp_path / STATE).write_bytes(state)  # as if it had not been written after steps 3 and 4
    append(log, 5)
    make_run(tmp_path).sync(log)
    client = connect(make_params(), tmp_path)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_server_that_does_not_answer_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = tmp_path / LOG
    append(log, 1)
    start = time.monotonic()
    with log_curves([make_run(tmp_path, f"http://127.0.0.1:{port}")], tmp_path) as run:
        run.sync(log)
        run.sync(log)  # within the pause: not tried again
    assert time.monotonic() - start < 30
    output = capsys.readouterr().err
    assert output.count("does not answer") == 1
    (kept,) = (tmp_path / ".work" / "mlflow").iterdir()
    assert str(kept) in output
    assert (kept / LOG).read_text() == log.read_text()


@pytest.mark.parametrize("left", ["", "{}", "[]", '{"state": 1}'])
def test_record_emptied_by_a_power_cut_is_set_aside(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unsent_directory(tmp_path) / "20260101-own"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(left)
    assert send_unsent(make_params(), tmp_path) == 0 and send_unsent(make_params(), tmp_path) == 0
    assert "its metrics cannot be sent; moved to" in capsys.readouterr().err
    assert (folder.with_name(".damaged-20260101-own") / "run.json").read_text() == left


class Server:
    """`mlflow server` on loopback with its own database, to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *artifacts, "--port", str(self.port), "--workers", "1"],
            cwd=self.folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2)
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.3)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.kill()


@pytest.mark.server
def test_end_of_a_run_does_not_print_the_servers_password(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.start()
    uri = server.uri.replace("//", "//ann:hunter2-s3cr3t@")
    params = TrackingParams(uri=uri, artifacts="mlflow-artifacts:/", experiment="toy", model_prefix="toy", metric={})
    run = MLflowRun(params, tmp_path, tmp_path, title="x", run_params={}, tags={})
    append(tmp_path / LOG, 1)
    run.sync(tmp_path / LOG)
    assert run.close(tmp_path / LOG, "FINISHED")
    import mlflow

    with mlflow.start_run(run_name="register"):  # as a registration does
        pass
    assert {found.info.status for found in connect(params, tmp_path).search_runs(["1"])} == {"FINISHED"}
    assert "hunter2" not in "".join(capfd.readouterr())


@pytest.mark.server
@pytest.mark.long
def test_every_step_once_over_a_server_that_is_killed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(curve_loggers, "PAUSE", 0.0)
    params, work = make_params(server.uri), tmp_path / "work"
    work.mkdir()
    log, state = work / LOG, work / STATE
    run = make_run(tmp_path, server.uri, work)
    with log_curves([run], work) as tracker:
        append(log, 1)
        tracker.sync(log)  # the server is not running yet
        server.start()
        append(log, 2)
        tracker.sync(log)
        server.kill()
        append(log, 3, 4)
        tracker.sync(log)
        server.start()
        append(log, 5)
        tracker.sync(log)
        state.write_text(json.dumps({**json.loads(state.read_text()), "step": 3}))  # sent, but not recorded
        run.close(log, "KILLED")
    # Killed and resumed; the server is away when it ends.
    run = make_run(tmp_path, server.uri, work)
    with log_curves([run], work) as tracker:
        tracker.sync(log)
        server.kill()
        append(log, 6)
    assert len(unsent_runs(tmp_path)) == 1
    assert send_unsent(params, tmp_path) == 1, "still away"
    state.unlink()  # as at the end of a training stage
    server.start()
    assert send_unsent(params, tmp_path) == 0

    client = connect(params, tmp_path)
    experiment = client.get_experiment_by_name("toy")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params == {"a.b": "1"}
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(step, 1 / step) for step in range(1, 7)]
