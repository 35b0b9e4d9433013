"""A real Prefect server on loopback with its own PREFECT_HOME."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PREFECT = [sys.executable, "-m", "prefect"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A Prefect server on loopback with its own PREFECT_HOME, and the REST calls that the tests need."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.env = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "15",
            "PREFECT_CLIENT_RETRY_EXTRA_CODES": "",
            "DO_NOT_TRACK": "1",
            "TMPDIR": str(home),
        }
        home.mkdir()
        self.log = (home / "server.log").open("w")
        self.command = ["server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = self.start(self.command)
        deadline = time.monotonic() + 120
        while not self.is_healthy():
            assert time.monotonic() < deadline and self.process.poll() is None, (home / "server.log").read_text()[
                -2000:
            ]
            time.sleep(0.5)

    def start(self, arguments: list[str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command in the background."""
        # Background jobs of a non-interactive shell ignore SIGINT, the only signal that stops a worker.
        command = ["env", "--default-signal=INT", *PREFECT, *arguments]
        return subprocess.Popen(command, env=self.env, cwd=cwd, stdout=self.log, stderr=subprocess.STDOUT)

    def run(self, arguments: list[str], cwd: Path) -> str:
        """Run a command and return its output."""
        done = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            env={**self.env, "PWD": str(cwd)},
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def is_healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for attempt in range(5):
            try:
                return json.loads(urllib.request.urlopen(request, timeout=120).read())
            except urllib.error.HTTPError as error:  # SQLite is locked; Prefect's own client retries as well
                if error.code != 503 or attempt == 4:
                    raise
                time.sleep(1)
        return None

    def flow_runs(self, state: str) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.post(
            "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": [state]}}}}
        )
        return runs

    def start_run(self, deployment: str, **parameters: Any) -> str:
        """Create a run of `flow/deployment`, as `prefect deployment run` does; return its id."""
        with urllib.request.urlopen(f"{self.url}/deployments/name/{deployment}", timeout=120) as answer:
            found = json.loads(answer.read())
        return str(self.post(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])

    def flow_run(self, run: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/flow_runs/{run}", timeout=120) as answer:
            return dict(json.loads(answer.read()))

    def wait_for(self, run: str, state: str, seconds: float = 120) -> dict[str, Any]:
        """Wait until the type of the run's state is `state`; return the state."""
        deadline = time.monotonic() + seconds
        while (found := self.flow_run(run)["state"] or {}).get("type") != state:
            ended = found.get("type") in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")  # plain-ok
            assert time.monotonic() < deadline and not ended, found
            time.sleep(0.5)
        return dict(found)

    def wait_for_any(self, state: str, seconds: float) -> dict[str, Any]:
        """Wait for any run in this state; return it."""
        deadline = time.monotonic() + seconds
        while not (runs := self.flow_runs(state)):
            assert time.monotonic() < deadline, f"no {state} run; failed: {self.flow_runs('FAILED')}"
            time.sleep(0.5)
        return runs[0]

    def task_states(self, run: str) -> dict[str, str]:
        found = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}, "limit": 50})
        return {task["name"]: task["state_name"] for task in found}

    def artifacts(self, run: str) -> dict[str, str]:
        """Return key -> data of the run's artifacts."""
        found = self.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {artifact["key"]: str(artifact["data"]) for artifact in found}

    def close(self) -> None:
        self.stop(self.process)
        self.log.close()

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
