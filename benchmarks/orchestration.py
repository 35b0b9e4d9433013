"""What Prefect and the supervisor add: `python benchmarks/orchestration.py [--workspace FOLDER] [--rounds N]`.

Aims: at most 2 s a part over plain `dvc repro` of the same stages; a `retrain` that finds nothing new within 15 s, with
a warm server. The stages are DVC's own, with commands that take no time; the server and the worker are real, on
loopback, with the worker's default polling. `--workspace`: a finished project to time the no-op in as well.
Writes benchmarks/results/orchestration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from common import write_result

ROOT = Path(__file__).parent.parent
PREFECT, DVC = [sys.executable, "-m", "prefect"], [sys.executable, "-m", "dvc"]
CHAIN = ["validate", "tokenizer", "shards"]
PARTS = 8  # tasks that run DVC: features and evaluate are two stages each


def make_workspace(folder: Path) -> None:
    """The pipeline's stages with commands that only write a file; every one depends on `seed`."""
    folder.mkdir()
    shutil.copy(ROOT / "params.yaml", folder)
    runs = list(yaml.safe_load((ROOT / "params.yaml").read_text())["finetune"])
    stages: dict[str, Any] = {}
    for before, name in zip(["seed", *CHAIN], CHAIN, strict=False):
        stages[name] = _stage(name, [before])
    groups = (
        ("pretrain", ["tden"], "shards"),
        ("finetune", runs, "pretrain-tden"),
        ("evaluate", runs, "finetune-${item}"),
    )
    for group, names, before in groups:
        stages[group] = {"foreach": names, "do": _stage(f"{group}-${{item}}", [before])}
    for name in ("register", "report"):
        stages[name] = _stage(name, [f"evaluate-{run}" for run in runs])
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    for command in (["git", "init", "-q"], [*DVC, "init", "-q"], [*DVC, "config", "core.analytics", "false"]):
        subprocess.run(command, cwd=folder, check=True)


def _stage(name: str, deps: list[str]) -> dict[str, Any]:
    return {"cmd": f"cat {' '.join(deps)} > {name}", "deps": deps, "outs": [name]}


class Site:
    """A server, a worker, and the flow's deployment of a workspace."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self.env = os.environ | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DVC_SITE_CACHE_DIR": str(home / "site"),
            "DO_NOT_TRACK": "1",
            "PYTHONPATH": str(ROOT),
        }
        home.mkdir()
        self.log = (home / "log").open("w")
        self.processes = [self._start("server", "start", "--host", "127.0.0.1", "--port", str(port))]
        while not self._healthy():
            time.sleep(0.5)
        self._prefect(ROOT, "work-pool", "create", "vlp", "--type", "process")
        self._prefect(ROOT, "gcl", "create", "gpu", "--limit", "1")
        self.processes.append(self._start("worker", "start", "--pool", "vlp"))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = ["env", "--default-signal=INT", *PREFECT, *arguments]
        return subprocess.Popen(command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT)

    def _prefect(self, folder: Path, *arguments: str) -> None:
        env = self.env | {"PWD": str(folder)}
        subprocess.run([*PREFECT, "--no-prompt", *arguments], cwd=folder, env=env, check=True, stdout=self.log)

    def _healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        while True:
            try:
                return json.loads(urllib.request.urlopen(request, timeout=30).read())
            except urllib.error.HTTPError as error:
                if error.code != 503:  # SQLite is locked; Prefect's own client tries again as well
                    raise
                time.sleep(0.5)

    def deploy(self, folder: Path) -> None:
        shutil.copy(ROOT / "prefect.yaml", folder)
        if not (folder / "flows").exists():
            (folder / "flows").symlink_to(ROOT / "flows")
        self._prefect(folder, "deploy", "--name", "weekly")

    def retrain(self) -> tuple[float, float]:
        """Runs the deployment: (seconds from the request to the end, seconds of the flow itself)."""
        deployment = self._call("/deployments/name/retrain/weekly")["id"]
        began = time.perf_counter()
        run = self._call(f"/deployments/{deployment}/create_flow_run", {})["id"]
        while True:
            flow_run = self._call(f"/flow_runs/{run}")
            if flow_run["state"]["type"] == "COMPLETED":
                return time.perf_counter() - began, float(flow_run["total_run_time"])
            if flow_run["state"]["type"] in ("FAILED", "CRASHED", "CANCELLED"):  # plain-ok
                raise SystemExit(f"retrain ended {flow_run['state']}")
            time.sleep(0.1)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def timed(command: list[str], folder: Path, env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "workspace"
        make_workspace(folder)
        site = Site(Path(temporary) / "prefect")
        try:
            result = measure(site, folder, arguments.rounds)
            if arguments.workspace:
                site.deploy(arguments.workspace.absolute())
                site.retrain()  # asks the gate, once
                walls = [site.retrain()[0] for _ in range(arguments.rounds)]
                result["no_op_of_finished_workspace_seconds"] = _summary(walls)
        finally:
            site.stop()
    print(write_result("orchestration", result))


def measure(site: Site, folder: Path, rounds: int) -> dict[str, Any]:
    """Everything stale, by `dvc repro` and by the flow in turns; then nothing stale."""
    seed, dvc, flow, no_op, plain = 0, [], [], [], []
    site.deploy(folder)
    load = os.getloadavg()[0]
    for _ in range(rounds):
        (folder / "seed").write_text(str(seed := seed + 1))
        dvc.append(timed([*DVC, "repro"], folder, site.env))
        (folder / "seed").write_text(str(seed := seed + 1))
        flow.append(site.retrain()[1])
        no_op.append(site.retrain()[0])
        plain.append(timed([sys.executable, "-m", "flows.retrain"], folder, site.env))
        print(f"dvc {dvc[-1]:.1f}  flow {flow[-1]:.1f}  no-op {no_op[-1]:.1f}  plain {plain[-1]:.1f}", flush=True)
    added = [(f - d) / PARTS for f, d in zip(flow, dvc, strict=True)]
    return {
        "parts": PARTS,
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "load_at_start": round(load, 1),
        "dvc_repro_all_stale_seconds": _summary(dvc),
        "flow_all_stale_seconds": _summary(flow),
        "overhead_per_part_seconds": _summary(added),
        "no_op_through_worker_seconds": _summary(no_op),
        "no_op_without_server_seconds": _summary(plain),
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 2),
        "min": round(min(seconds), 2),
        "max": round(max(seconds), 2),
    }


if __name__ == "__main__":
    main()
