"""An MLflow server that is killed and comes back has every line once, in order, in one run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlp_models.errors import TrackingError
from vlp_models.params import TrackingParams
from vlp_models.registry import logger
from vlp_models.registry.client import connect
from vlp_models.registry.logger import MLflowRun, _resend_directory, replay, tracked, waiting
from vlp_models.training.log import LOG


class Server:
    """`mlflow server` on loopback over a database of its own, to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        place = ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *place, "--port", str(self.port), "--workers", "1"],
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
def test_a_run_that_ends_prints_no_password_of_its_server(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    server.start()
    uri = server.uri.replace("//", "//ann:hunter2-s3cr3t@")
    params = TrackingParams(uri=uri, artifacts="mlflow-artifacts:/", experiment="toy", model_prefix="toy", metric={})
    run = MLflowRun(params, tmp_path, tmp_path, name="x", run_params={}, tags={})
    write(tmp_path / LOG, 1)
    run.sync(tmp_path / LOG)
    assert run.close(tmp_path / LOG, "FINISHED")
    import mlflow

    with mlflow.start_run(run_name="register"):  # as a registration's
        pass
    assert {found.info.status for found in connect(params, tmp_path).search_runs(["1"])} == {"FINISHED"}
    assert "hunter2" not in "".join(capfd.readouterr())


def write(log: Path, *steps: int) -> None:
    with log.open("a") as file:
        for step in steps:
            row = {"step": step, "epoch": 1, "loss": 1 / step, "seconds": 0.1, "time": 1_700_000_000_000 + step}
            file.write(json.dumps(row) + "\n")


@pytest.mark.server
@pytest.mark.long
def test_every_line_once_over_a_killed_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(logger, "PAUSE", 0.0)
    params = TrackingParams(uri=server.uri, artifacts="a", experiment="toy", model_prefix="toy", metric={})

    def run() -> MLflowRun:
        return MLflowRun(params, tmp_path, work, name="pretrain", run_params={"a": {"b": 1}}, tags={})

    work = tmp_path / "work"
    work.mkdir()
    log = work / LOG
    with tracked(run(), work) as tracker:
        assert tracker is not None
        write(log, 1)
        tracker.sync(log)  # nobody there yet
        server.start()
        write(log, 2)
        tracker.sync(log)
        server.kill()
        write(log, 3, 4)
        tracker.sync(log)
        server.start()
        write(log, 5)
        tracker.sync(log)
        state = work / logger.STATE
        state.write_text(json.dumps({**json.loads(state.read_text()), "step": 3}))  # sent, but not noted
        tracker.close(log, "KILLED")
    # killed and resumed, MLflow gone at its end
    with tracked(run(), work) as tracker:
        assert tracker is not None
        tracker.sync(log)
        server.kill()
        write(log, 6)
    assert len(waiting(tmp_path)) == 1
    assert replay(params, tmp_path) == 1, "still away"
    state.unlink()  # what `forget` does
    server.start()
    assert replay(params, tmp_path) == 0

    client = connect(params, tmp_path)
    experiment = client.get_experiment_by_name("toy")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params == {"a.b": "1"}
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(step, 1 / step) for step in range(1, 7)]


def test_a_database_that_can_not_be_opened_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").mkdir()
    params = TrackingParams(uri="sqlite:///mlflow.db", artifacts="a", experiment="toy", model_prefix="toy", metric={})
    began = time.monotonic()
    with pytest.raises(TrackingError, match="unable to open database file"):
        connect(params, tmp_path)
    assert time.monotonic() - began < 60, "MLflow alone takes 200 s"


@pytest.mark.parametrize("left", ["", "{}", "[]", '{"state": 1}'])
def test_a_record_that_a_power_cut_emptied_holds_nobody_up(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    params = TrackingParams(uri="sqlite:///mlflow.db", artifacts="a", experiment="toy", model_prefix="toy", metric={})
    place = _resend_directory(tmp_path) / "20260101-own"
    place.mkdir(parents=True)
    (place / "run.json").write_text(left)
    assert replay(params, tmp_path) == 0 and replay(params, tmp_path) == 0
    assert "its numbers can't be sent; now in" in capsys.readouterr().err
    assert (place.with_name(".damaged-20260101-own") / "run.json").read_text() == left
