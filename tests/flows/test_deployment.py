"""The README's deployment, on a real Prefect server: deploy, schedule, run through a worker.

Two packages break Prefect 3.8 without failing at import or at deploy (fastapi >= 0.151, sqlalchemy >= 2.1): the
second only stops schedules from ever making runs. So this test waits for a scheduled run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PREFECT = [sys.executable, "-m", "prefect"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A Prefect server on loopback with a home of its own, and the REST calls the test needs."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.env = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_CLIENT_RETRY_EXTRA_CODES": "",
            "DO_NOT_TRACK": "1",
            "TMPDIR": str(home),
        }
        home.mkdir()
        self.log = (home / "server.log").open("w")
        self.process = self.start(["server", "start", "--host", "127.0.0.1", "--port", str(self.port)])
        deadline = time.monotonic() + 120
        while not self.healthy():
            assert time.monotonic() < deadline and self.process.poll() is None, (home / "server.log").read_text()[
                -2000:
            ]
            time.sleep(0.5)

    def start(self, arguments: list[str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        # A shell that puts jobs in the background has them ignore SIGINT, and a worker stops on nothing else.
        command = ["env", "--default-signal=INT", *PREFECT, *arguments]
        return subprocess.Popen(command, env=self.env, cwd=cwd, stdout=self.log, stderr=subprocess.STDOUT)

    def run(self, arguments: list[str], cwd: Path) -> str:
        done = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            env={**self.env, "PWD": str(cwd)},
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request, timeout=30).read())

    def flow_runs(self, state: str) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.post(
            "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": [state]}}}}
        )
        return runs

    def wait_for_run(self, state: str, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not (runs := self.flow_runs(state)):
            assert time.monotonic() < deadline, f"no {state} run; failed: {self.flow_runs('FAILED')}"
            time.sleep(1)
        return runs[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "prefect")
    yield running
    running.process.send_signal(signal.SIGINT)
    try:
        running.process.wait(20)
    except subprocess.TimeoutExpired:
        running.process.kill()
    running.log.close()


@pytest.mark.server
@pytest.mark.timeout(400)
def test_deploy_schedule_and_run_through_a_worker(server: Server, project: Path) -> None:
    shutil.copy(ROOT / "prefect.yaml", project)
    (project / "flows").symlink_to(ROOT / "flows")

    server.run(["work-pool", "create", "vlp", "--type", "process"], project)
    server.run(["deploy", "--all"], project)
    deployment = server.post("/deployments/filter", {})[0]
    assert deployment["name"] == "weekly"
    assert [schedule["active"] for schedule in deployment["schedules"]] == [False], "shipped paused"
    assert server.flow_runs("SCHEDULED") == []

    server.run(["deployment", "run", "retrain/weekly"], project)
    worker = server.start(["worker", "start", "--pool", "vlp"], project)
    try:
        server.wait_for_run("COMPLETED", 180)
    finally:
        worker.send_signal(signal.SIGINT)
        worker.wait(60)
    assert (project / "report").exists()
    names = {run["name"] for run in server.post("/task_runs/filter", {"limit": 50})}
    assert {
        "validate",
        "features",
        "pretrain",
        "scheduled sampling",
        "evaluate",
        "register",
        "report",
        "finetune vqa",
    } <= names

    server.run(["deployment", "schedule", "resume", "retrain/weekly", deployment["schedules"][0]["id"]], project)
    assert server.wait_for_run("SCHEDULED", 90)["deployment_id"] == deployment["id"]
