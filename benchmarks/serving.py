"""How fast registered models answer over HTTP, with and without batches of concurrent requests.

    python benchmarks/serving.py PROJECT --out benchmarks/results/serving-cpu.json    # a project after `make demo`

Serves each task's champion (else its newest version) with this code, on loopback, by the application of `mlflow models
serve`, in a process of its own with one thread. Clients wait for each answer before they ask again. Both ways answer
the same requests first and must agree; then they take turns, round by round. Reports p50 and p99 in milliseconds, and
answers per second.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]  # the code that is served
CLIENTS = (1, 4, 16)
QUESTION = "what color is the circle ?"
WAYS = {"one at a time": "1", "batches": "16"}

SERVER = """
import sys, tempfile, mlflow, uvicorn
from mlflow.pyfunc import scoring_server
from vlp_models.registry import pyfunc_model
from vlp_models.registry.versions import download_bundle
name, version, port, max_rows = sys.argv[1:]
bundle = download_bundle(mlflow.MlflowClient().get_model_version(name, version))
folder = tempfile.mkdtemp()
mlflow.pyfunc.save_model(folder + "/model", python_model=pyfunc_model.__file__, artifacts={"bundle": str(bundle)})
model = mlflow.pyfunc.load_model(folder + "/model")
model.unwrap_python_model().batching.max_rows = int(max_rows)
uvicorn.run(scoring_server.init(model), host="127.0.0.1", port=int(port), log_level="warning")
"""


class Server:
    """A served version in a process of its own, until `stop`."""

    def __init__(self, project: Path, name: str, version: str, max_rows: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MLFLOW_TRACKING_URI": f"sqlite:///{project / 'mlflow.db'}",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, name, version, str(port), max_rows], cwd=ROOT, env=environment
        )
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.address}/ping", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server of {name} did not start") from None
                time.sleep(0.2)
        raise RuntimeError(f"the server of {name} does not answer")

    def ask(self, body: bytes) -> tuple[float, Any]:
        """Return the seconds of a request, and its answer."""
        request = urllib.request.Request(f"{self.address}/invocations", body, {"Content-Type": "application/json"})
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        return time.perf_counter() - began, answer["predictions"][0]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def load(server: Server, bodies: list[bytes], clients: int) -> dict[str, float]:
    """Let the clients ask for all bodies, each its own share."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        shares = list(
            pool.map(lambda own: [server.ask(body)[0] for body in own], [bodies[i::clients] for i in range(clients)])
        )
    seconds = sorted(one for share in shares for one in share)
    total = time.perf_counter() - began
    return {
        "p50": 1000 * statistics.median(seconds),
        "p99": 1000 * seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
        "per_second": len(seconds) / total,
    }


def measure(project: Path, task: str, rounds: int, requests: int) -> list[dict[str, Any]]:
    images = sorted((project / "data" / "raw").rglob("*.png"))[: 16 * requests]
    text = {} if task == "captioning" else {"text": QUESTION}
    records = [{"image": base64.b64encode(path.read_bytes()).decode(), **text} for path in images]
    bodies = [json.dumps({"dataframe_records": [record]}).encode() for record in records]
    version = newest(project, task)
    servers = {name: Server(project, f"vlp-{task}", version, max_rows) for name, max_rows in WAYS.items()}
    found = []
    try:
        key = "caption" if task == "captioning" else "answer"
        with ThreadPoolExecutor(8) as pool:
            answers = {
                name: [one[key] for _, one in pool.map(server.ask, bodies[:64])] for name, server in servers.items()
            }
        first, other = answers.values()
        assert first == other, "batches change answers"
        for clients in CLIENTS:
            results: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(rounds):
                count = requests * min(clients, 4)
                own = [bodies[(number * count + i) % len(bodies)] for i in range(count)]
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    results[name].append(load(servers[name], own, clients))
            for name, rounds_of_it in results.items():
                medians = {
                    key: round(statistics.median(one[key] for one in rounds_of_it), 1) for key in rounds_of_it[0]
                }
                found.append({"task": task, "clients": clients, "way": name, **medians})
                print(json.dumps(found[-1]), flush=True)
    finally:
        for server in servers.values():
            server.stop()
    return found


def newest(project: Path, task: str) -> str:
    """Return the champion's version, else the newest."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{project / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    model = client.get_registered_model(f"vlp-{task}")
    return str(model.aliases.get("champion") or max(int(version.version) for version in model.latest_versions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["captioning", "vqa"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=25, help="of a client in a round (at most four clients' worth)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    project = options.project.resolve()
    found = [row for task in options.tasks for row in measure(project, task, options.rounds, options.requests)]
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
