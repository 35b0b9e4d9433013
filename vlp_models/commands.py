"""What the commands of `vlp` do, apart from reading their arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError

if TYPE_CHECKING:
    from vlp_models.params import Params


ON_CLUSTER = ("features", "shards")


def run_stage(name: str, key: str, params_file: str) -> None:
    """One stage; features and shards on the cluster of params.yaml, if it names one (flows/cluster.py)."""
    import importlib

    from vlp_models.params import load_params
    from vlp_models.stages.workspace import Workspace

    params = load_params(params_file)
    if name in ON_CLUSTER and params.cluster.address:
        # A process: what is under the flows does not import them.
        command = [sys.executable, "-m", "flows.cluster", name, "--params", params_file]
        code = subprocess.run(command).returncode
        if code:
            raise SystemExit(code)
        return
    importlib.import_module(f"vlp_models.stages.{name}").run(params, Workspace(), key)


def run_pipeline(targets: list[str]) -> int:
    """`dvc repro`, then the results table, the report's path and the command that opens MLflow. Returns DVC's code."""
    from vlp_models.params import load_params
    from vlp_models.stages.workspace import Workspace

    params, workspace = load_params(), Workspace()
    _check_options(params)
    start, began = time.perf_counter(), time.time()
    environment = dict(os.environ)
    # A stage's command is `vlp ...`: the one beside this interpreter, also when the venv is not activated.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment.setdefault("GX_ANALYTICS_ENABLED", "false")
    code = subprocess.run([sys.executable, "-m", "dvc", "repro", *targets], env=environment).returncode
    if code:
        print(
            "\nThe pipeline stopped at the stage above. What was finished stays; run the same command to go on from "
            "there (training resumes at its last checkpoint).",
            file=sys.stderr,
        )
        return code
    summary = workspace.reports / "summary.json"
    if summary.exists():
        if summary.stat().st_mtime < began:  # else the report stage has just printed it
            from vlp_models.stages.results_table import print_results

            print_results(summary)
        print(f"\nreport     {workspace.reports / 'index.html'}")
    print(f"MLflow UI  mlflow ui --backend-store-uri {params.tracking.uri} --host 127.0.0.1 --port 5000")
    print(f"took       {time.perf_counter() - start:.0f} s")
    return 0


def _check_options(params: Params) -> None:
    """A wrong option is found here, not after the pretraining. Only runs with options make this load the tasks."""
    for name, run in params.finetune.items():
        if run.options:
            from vlp_models.tasks.base import read_options, task_class

            read_options(task_class(run.task), run.options, where=f"finetune.{name}.options")


def predict(task: str, images: list[str], texts: list[str] | None, model: str) -> list[dict[str, Any]]:
    """Predictions of the registered champion of `task`."""
    missing = [path for path in images if not Path(path).is_file()]
    if missing:
        raise DataError(f"{', '.join(missing)}: no such file")
    from vlp_models.params import load_params
    from vlp_models.tracking.client import connect
    from vlp_models.tracking.registry import load_predictor, model_name

    params = load_params().tracking
    client = connect(params, Path.cwd())
    return load_predictor(client, model or model_name(params, task)).predict(images, texts)


def print_findings() -> int:
    """Prints `vlp doctor`'s findings; 1 if one of them is a problem."""
    from rich.console import Console
    from rich.text import Text

    from vlp_models.doctor import examine

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    console, worst = Console(), 0
    for finding in examine(Path.cwd()):
        console.print(
            Text(f"{finding.level:8}", styles[finding.level]), Text(f"{finding.subject:18}", "bold"), finding.text
        )
        worst |= finding.level == "problem"
    return int(worst)
