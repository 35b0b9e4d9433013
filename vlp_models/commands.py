"""What the commands of `vlp` do, apart from reading their arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError
from vlp_models.exclusive import exclusive

if TYPE_CHECKING:
    from vlp_models.params import Params
    from vlp_models.workspace.paths import Workspace


ON_CLUSTER = ("features", "shards")


def run_stage(name: str, key: str, params_file: str) -> None:
    """One stage; features and shards on the cluster of params.yaml, if it names one (flows/cluster.py)."""
    import importlib

    from vlp_models.params import load_params
    from vlp_models.workspace.guard import guarded
    from vlp_models.workspace.paths import Workspace

    params, workspace = load_params(params_file), Workspace()
    with guarded(workspace, f"{name}@{key}" if key else name):
        if name in ON_CLUSTER and params.cluster.address:
            # A process: what is under the flows does not import them.
            command = [sys.executable, "-m", "flows.cluster", name, "--params", params_file]
            code = subprocess.run(command).returncode
            if code:
                raise SystemExit(code)
        else:
            importlib.import_module(f"vlp_models.stages.{name}").run(params, workspace, key)


def run_pipeline(targets: list[str]) -> int:
    """`dvc repro`, then the results table, the report's path and the command that opens MLflow. Returns DVC's code.

    Raises:
        DataError: another `vlp run` is at work in this workspace.
    """
    from vlp_models.params import load_params
    from vlp_models.preflight import preflight
    from vlp_models.workspace.paths import Workspace

    params, workspace = load_params(), Workspace()
    _check_options(params)
    with exclusive(workspace.root / ".work" / "run.lock", "`vlp run`"):
        for line in preflight(workspace.root):
            print(line, file=sys.stderr)
        code = _run_dvc(params, workspace, targets)
        _send_waiting(params, workspace)
        return code


def _run_dvc(params: Params, workspace: Workspace, targets: list[str]) -> int:
    start, began = time.perf_counter(), time.time()
    environment = dict(os.environ)
    # A stage's command is `vlp ...`: the one beside this interpreter, also when the venv is not activated.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment.setdefault("GX_ANALYTICS_ENABLED", "false")
    environment.setdefault("VLP_GRACE", "600")  # nobody hurries us here, and a large training saves slowly
    command = [sys.executable, "-m", "dvc", "repro", *targets]
    code = _supervised(command, environment)
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
            from vlp_models.report.table import print_results

            print_results(summary)
        print(f"\nreport     {workspace.reports / 'index.html'}")
    print(f"MLflow UI  mlflow ui --backend-store-uri {params.tracking.uri} --host 127.0.0.1 --port 5000")
    print(f"took       {time.perf_counter() - start:.0f} s")
    return 0


def _send_waiting(params: Params, workspace: Workspace) -> None:
    """The metrics of runs that ended while MLflow was away."""
    if any((workspace.root / ".work" / "mlflow").glob("[!.]*")):  # else MLflow need not be loaded
        from vlp_models.tracking.spool import replay

        replay(params.tracking, workspace.root)


def _supervised(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command under a supervisor; SIGINT and SIGTERM go through it and give a trainer the time to save."""
    process = subprocess.Popen([sys.executable, "-m", "vlp_models.supervise", "--", *command], env=environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: process.terminate())
    return process.wait()


def _check_options(params: Params) -> None:
    """A wrong task or option is found here, not after the pretraining. Only runs with options make this load a task."""
    from vlp_models.tasks import check_task

    for name, run in params.finetune.items():
        check_task(run.task, where=f"finetune.{name}.task")
        if run.options:
            from vlp_models.tasks import task_class
            from vlp_models.tasks.base import read_options

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
