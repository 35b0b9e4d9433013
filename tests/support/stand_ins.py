"""What documented_pages.py runs in place of, or after, a documented command: `python stand_ins.py NAME ARGUMENT ...`.

open-once COMMAND ...   start a web server on a free port, open its page once, and stop it
tiny-sizes              reduce params.yaml to sizes that take seconds
uv ARGUMENT ...         check a lock file and, of requirements-photographs.lock, its packages; install nothing
kubernetes FILE         validate a YAML file's objects against the schema of the Kubernetes API
flow-runs COUNT         wait until so many runs of the server at PREFECT_API_URL are Completed, and no other ended
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.params import Params

KUBERNETES = "1.33"
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)([^\\]*)\\$", re.M)
OPTIONS = {"--quiet", "--no-deps", "--require-hashes", "--python"}
LARGEST = {
    "detector.steps": 4,
    "detector.batch_size": 4,
    "evaluate.bootstrap": 50,
    "evaluate.beam_size": 2,
    "evaluate.gallery": 4,
    "evaluate.consensus_samples": 4,
    "evaluate.consensus_neighbors": 4,
    "ingest.settle_seconds": 1,
    "tokenizer.min_answer_count": 1,
}
LARGEST_GENERATED = {"train": 24, "val": 8, "test": 8}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_once(command: list[str], seconds: float = 240) -> int:
    """Return 0 if the page was served and the server then stopped."""
    port = free_port()
    server = subprocess.Popen([*command, "--port", str(port)])
    deadline = time.monotonic() + seconds
    try:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                    print(f"{answer.status}, {len(answer.read())} bytes", flush=True)
                    return int(answer.status != 200)
            except urllib.error.HTTPError as error:  # a page behind a token
                print(error.code, flush=True)
                return int(error.code not in (401, 403))
            except OSError:
                time.sleep(0.5)
        return server.returncode or 1
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        server.wait(60)


def tiny_sizes(params: Params) -> list[str]:
    """Return the settings that reduce these params; what is smaller already stays.

    A run of one epoch with small batches stays as it is (the preset tiny has those); any other stops after two
    updates, or one per objective.
    """
    changes: dict[str, Any] = {}

    def limit(key: str, value: float, largest: float) -> None:
        if value > largest:
            changes[key] = largest

    for key, largest in LARGEST.items():
        section, _, name = key.partition(".")
        limit(key, getattr(getattr(params, section), name), largest)
    for name, dataset in params.generate.items():
        for split, count in LARGEST_GENERATED.items():
            limit(f"generate.{name}.{split}", getattr(dataset, split), count)
    for name, model in params.models.items():
        if model.vision_warmup:
            limit(f"models.{name}.vision_warmup.steps", model.vision_warmup.steps, 2)
    runs = [(f"pretrain.{name}", run, len(run.recipe.objectives)) for name, run in params.pretrain.items()]
    runs += [(f"finetune.{name}", run, 1) for name, run in params.finetune.items()]
    for key, run, objectives in runs:
        updates = max(2, objectives)
        long = run.max_steps > updates or (not run.max_steps and (run.max_epochs > 1 or run.batch_size > 32))
        if long:
            changes[f"{key}.max_steps"] = updates
            limit(f"{key}.batch_size", run.batch_size, 8)
    if params.trainer.precision == "bf16-where-native":
        changes["trainer.precision"] = "32-true"
    return [f"{key}={value}" for key, value in changes.items()]


def apply_tiny_sizes() -> int:
    from vlp_models.cli.presets import apply_overlay
    from vlp_models.params import load_params

    file = Path("params.yaml")
    if settings := tiny_sizes(load_params(file)):
        apply_overlay(file, None, settings)
    return 0


def missing_packages(lock: Path) -> list[str]:
    """Return the pins of a lock file that are not installed; those with a condition are left out."""
    found = []
    for name, version, condition in PIN.findall(lock.read_text()):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if installed != version and not condition.strip():
            found.append(f"{name}=={version}")
    return found


def check_installation(arguments: list[str]) -> int:
    """Check `uv pip install [OPTION ...] -r FILE`."""
    lock, options = Path(arguments[-1]), set(arguments[2:-2])
    assert arguments[:2] == ["pip", "install"] and arguments[-2] == "-r" and "--require-hashes" in options, arguments
    assert options <= OPTIONS | {".venv/bin/python"}, options
    pins = PIN.findall(lock.read_text())
    assert pins and lock.read_text().count("--hash=sha256:") >= len(pins), f"{lock}: not pinned by hashes"
    missing = missing_packages(lock) if "photographs" in lock.name else []
    print(f"{lock}: {len(pins)} packages" + (f", not installed: {', '.join(missing)}" if missing else ""))
    return int(bool(missing))


def check_kubernetes(file: Path) -> int:
    import kubernetes_validate
    import yaml

    for item in yaml.safe_load_all(file.read_text()):
        item["metadata"].pop("creationTimestamp", None)  # null, as `kubectl --dry-run` prints it
        group = item["apiVersion"].rpartition("/")[0]
        if "." in group and not group.endswith(".k8s.io"):
            print(f"{item['kind']} {item['metadata']['name']}: the operator's, not checked")
            continue
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
        print(f"{item['kind']} {item['metadata']['name']}: valid")
    return 0


def await_flow_runs(count: int, seconds: float = 900) -> int:
    deadline = time.monotonic() + seconds
    headers = {"Content-Type": "application/json"}
    while True:
        request = urllib.request.Request(os.environ["PREFECT_API_URL"] + "/flow_runs/filter", b"{}", headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            runs = [run for run in json.loads(answer.read()) if run["state_type"] not in ("SCHEDULED", "PENDING")]
        states = [run["state_type"] for run in runs]
        ended = len(states) - states.count("RUNNING")
        if ended >= count or ended > states.count("COMPLETED") or time.monotonic() > deadline:
            for run in runs:
                print(run["name"], run["parameters"], run["state"]["name"], run["state"]["message"], flush=True)
            return int(states.count("COMPLETED") < count)
        time.sleep(1)


def main(name: str, *arguments: str) -> int:
    if name == "open-once":
        return open_once(list(arguments))
    if name == "tiny-sizes":
        return apply_tiny_sizes()
    if name == "uv":
        return check_installation(list(arguments))
    if name == "flow-runs":
        return await_flow_runs(int(*arguments))
    return check_kubernetes(Path(*arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
