"""What the commands of `vlp` do, apart from reading their arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.lock import file_lock
from vlp_models.common.packages import weights_dependency
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import DataError, ParamsError, TrackingError

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import Params


ON_CLUSTER = ("features", "shards")


def run_stage(name: str, key: str, params_file: str) -> None:
    """Run one stage; features and shards on the cluster of params.yaml, if it names one (flows/cluster.py).

    Raises:
        ParamsError: there is no such stage, or its params were edited while it ran: DVC would record the new ones.
        DataError: the dataset that `prepare` read was changed meanwhile.
    """
    import importlib

    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params, nearest
    from vlp_models.pipeline.dvc.consistency import unchanged_inputs
    from vlp_models.pipeline.dvc.graph import STAGES
    from vlp_models.pipeline.guard import guarded, run_by_dvc

    if name not in STAGES:
        raise ParamsError(f"no stage `{name}`{nearest(name, STAGES)}")
    params, workspace = load_params(params_file), Workspace()
    unchanged = unchanged_inputs(workspace, params_file, name, key) if run_by_dvc() else nullcontext(params)
    with guarded(workspace, f"{name}@{key}" if key else name), unchanged as params:
        if name in ON_CLUSTER and params.cluster.address:
            # A subprocess, because imports point down: vlp_models does not import flows.
            command = [sys.executable, "-m", "flows.cluster", name, "--params", params_file]
            code = subprocess.run(command).returncode
            if code:
                raise SystemExit(code)
        else:
            importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, workspace, key)


def write_plan() -> bool:
    """Writes dvc.yaml anew from params.yaml, and notes the packages that it names; returns whether dvc.yaml changed.

    Raises:
        ParamsError: params.yaml is wrong, or holds a run that can't be.
        MissingToolError: a package it names is not installed.
    """
    from vlp_models.common.io import write_text
    from vlp_models.common.packages import record_packages
    from vlp_models.common.workspace import Workspace
    from vlp_models.models.meta_model import image_kinds
    from vlp_models.params import load_params
    from vlp_models.pipeline.check_params import check_runs
    from vlp_models.pipeline.dvc.dvc_yaml import FILE, is_ours
    from vlp_models.pipeline.dvc.external import packages
    from vlp_models.pipeline.stages.plan import planned

    params, workspace = load_params(), Workspace()
    check_runs(params)
    record_packages(packages(params, regions="regions" in image_kinds(params).values()), workspace.root)
    if not is_ours(workspace.root):
        print(f"{FILE}: written by hand, as its first line says; left as it is", file=sys.stderr)
        return False
    text, file = planned(params, workspace), workspace.root / FILE
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    write_text(file, text)
    return True


def run_pipeline(targets: list[str]) -> int:
    """`dvc repro`, then the results table, the report's path and the command that opens MLflow. Returns DVC's code.

    Raises:
        DataError: another `vlp run` is at work in this workspace.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.consistency import clear_records, explain_removal, remove_wrong_entries
    from vlp_models.pipeline.dvc.lock_file import repair

    start = time.perf_counter()
    params, workspace = load_params(), Workspace()
    with file_lock(workspace.root / ".work" / "run.lock", "`vlp run`"):
        if write_plan():
            print("dvc.yaml: written anew from params.yaml", file=sys.stderr)
        for line in repair(workspace.root):
            print(line, file=sys.stderr)
        clear_records(workspace.root)
        code = _run_dvc(params, workspace, targets)
        if edited := remove_wrong_entries(workspace.root):
            print(explain_removal(edited), file=sys.stderr)
            code = code or 1
        _send_waiting(params, workspace)
        if not code and (not targets or "register" in targets):
            code = _register_again(params, workspace)
        if not code:
            print(f"took       {time.perf_counter() - start:.0f} s")
        return code


def _register_again(params: Params, workspace: Workspace) -> int:
    """Puts back what the registry has lost since `register` ran, which DVC can't see. Returns DVC's code."""
    from vlp_models.registry.receipts import find_lost_versions

    try:
        gone = find_lost_versions(params.tracking, workspace.root)
    except TrackingError as error:
        print(f"whether the registry holds what was registered is not known: {error}", file=sys.stderr)
        return 0
    if not gone:
        return 0
    print(f"MLflow has lost {', '.join(gone)}; registering again", file=sys.stderr)
    return _supervised([[sys.executable, "-m", "dvc", "repro", "--force", "--single-item", "register"]], _environment())


def _not_imported(params: Params, workspace: Workspace) -> list[str]:
    """Return an error for each initial checkpoint that is missing: DVC would name only the path."""
    lost = {
        f"models.{name}.{key}": source
        for name, model in params.models.items()
        for key, source in (("init", model.init), ("image_init", model.image_init))
        if weights_dependency(source) and not (workspace.root / weights_dependency(source)).exists()
    }
    return [
        f"params.yaml: `{where}`: {weights} not found; "
        + (
            "the path is relative to the project root"
            if where.endswith(".image_init")
            else f"create it with `vlp import-checkpoint ... --name {Path(weights).name}`"
        )
        for where, weights in lost.items()
    ]


def _run_dvc(params: Params, workspace: Workspace, targets: list[str]) -> int:
    from vlp_models.pipeline.parallel_finetune import finetune_beside

    began = time.time()
    environment = _environment()
    code = finetune_beside(params, workspace.root, environment, _supervised) if not targets else 0
    code = code or _supervised([[sys.executable, "-m", "dvc", "repro", *targets]], environment)
    if code:
        print(
            "\nThe pipeline stopped at the stage above. What was finished stays; run the same command to go on from "
            "there (training resumes at its last checkpoint).",
            file=sys.stderr,
        )
        for line in _not_imported(params, workspace):
            print(line, file=sys.stderr)
        return code
    summary = workspace.reports / "summary.json"
    if summary.exists():
        if summary.stat().st_mtime < began:  # else the report stage has just printed it
            from vlp_models.evaluation.report.records import print_results

            print_results(summary)
        print(f"\nreport     {workspace.reports / 'index.html'}")
    print(f"MLflow UI  mlflow ui --backend-store-uri {redact(params.tracking.uri)} --host 127.0.0.1 --port 5000")
    return 0


def _environment() -> dict[str, str]:
    """Of DVC and the stages that it runs."""
    environment = dict(os.environ)
    # A stage's command is `vlp ...`: the one beside this interpreter, also when the venv is not activated.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment.setdefault("GX_ANALYTICS_ENABLED", "false")
    environment.setdefault("VLP_GRACE", "600")  # nobody hurries us here, and a large training saves slowly
    return environment


def _send_waiting(params: Params, workspace: Workspace) -> None:
    """The metrics of runs that ended while MLflow was away."""
    if any((workspace.root / ".work" / "mlflow").glob("[!.]*")):  # else MLflow need not be loaded
        from vlp_models.registry.logger import send_unsent

        send_unsent(params.tracking, workspace.root)


def _supervised(commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int:
    """Runs commands, each under a supervisor; SIGINT and SIGTERM go through it and give a trainer the time to save.

    Returns the first exit code that is not 0; after it no further command begins.
    """
    waiting, running, code = list(reversed(commands)), list[subprocess.Popen[bytes]](), 0

    def stop(received: int, frame: Any) -> None:
        waiting.clear()
        for process in running:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while waiting or running:
        while waiting and len(running) < at_once:
            command = [sys.executable, "-m", "vlp_models.common.supervise", "--", *waiting.pop()]
            running.append(subprocess.Popen(command, env=environment))
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=0.2)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            code = code or process.returncode
            if code:
                waiting.clear()
    return code


def predict(task: str, images: Sequence[str | list[str]], texts: list[str] | None, model: str) -> list[dict[str, Any]]:
    """Predictions of the champion of `task`, or of `model`: a registered name's champion, or a version of it, such as
    `vlp-vqa/3` and `vlp-vqa@challenger`.

    Args:
        images: for a task that looks at several at a time, lists of them.

    Raises:
        DataError: an image is missing, or nothing is registered under that name.
    """
    paths = [path for one in images for path in ([one] if isinstance(one, str) else one)]
    missing = [path for path in paths if not os.path.isfile(path)]  # noqa: PTH113 - Path raises for a name too long
    if missing:
        raise DataError(f"{', '.join(missing)}: no such file")
    from vlp_models.cli.history import find_version
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect
    from vlp_models.registry.versions import download_verified_bundle, load_predictor, model_name
    from vlp_models.serving.predictor import Predictor

    params = load_params()
    client = connect(params.tracking, Path.cwd())
    if "/" in model or "@" in model:
        predictor: Predictor = Predictor(download_verified_bundle(find_version(client, params, model)))
    else:
        predictor = load_predictor(client, model or model_name(params.tracking, task))
    return predictor.predict(images, texts)


def print_verification(version: str, *, as_json: bool = False) -> int:
    """Prints what `verify` finds; 1 if something differs."""
    import json

    from vlp_models.cli.history import find_version
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.verify import verify

    params, workspace = load_params(), Workspace()
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        found = find_version(client, params, version)
        checks = verify(client, workspace, found)
    name = f"{found.name} version {found.version}"
    if as_json:
        print(json.dumps({"version": name, "checks": [redacted(vars(check)) for check in checks]}, indent=2))
    else:
        print(name)
        for check in checks:
            print(f"  {check.state:8} {check.subject:8} {redact(check.text)}")
    return int(any(check.state == "differs" for check in checks))


def forget(
    names: Sequence[str],
    *,
    dry_run: bool,
    sure: Callable[[], bool],
    exact: bool,
    keep_print: bool,
    aliases: bool,
    retrain: bool,
    by: str,
    as_json: bool,
) -> int:
    """Says who saw these pictures, takes them out of the datasets, and makes the models again, as far as it is asked.

    Args:
        sure: asks, once it is said what would be done.

    Raises:
        DataError: a name that means no picture; a dataset that is not prepared; another `vlp run` is at work.
    """
    import json

    from vlp_models.common.workspace import WITHDRAWN, Workspace
    from vlp_models.forgetting.forget import look, take_aliases, take_out
    from vlp_models.forgetting.told import lines, plain
    from vlp_models.params import load_params
    from vlp_models.pipeline.promote import current_user

    params, workspace = load_params(), Workspace()
    alone = nullcontext() if dry_run else file_lock(workspace.root / ".work" / "run.lock", "`vlp run`")
    with alone:
        looked = look(params, workspace, names, exact=exact)
        if as_json:
            print(json.dumps(plain(looked, params), indent=2, ensure_ascii=False))
        else:
            print("\n".join(lines(looked, params, workspace)))
        if dry_run:
            return 0
        if not sure():
            print("nothing was changed", file=sys.stderr)
            return 1
        new = take_out(params, workspace, looked, keep_print=keep_print, by=by or current_user())
        print(f"{WITHDRAWN}: {new} pictures more; `git add {WITHDRAWN}` and dvc.yaml, and commit", file=sys.stderr)
        for line in take_aliases(params, workspace, looked, by=by or current_user()) if aliases else ():
            print(line, file=sys.stderr)
        write_plan()
    if not retrain:
        print("the data and the models are as they were until `vlp run`", file=sys.stderr)
        return 0
    return run_pipeline([])


def print_findings() -> int:
    """Prints `vlp doctor`'s findings; 1 if one of them is a problem."""
    from rich.console import Console
    from rich.text import Text

    from vlp_models.cli.doctor import examine

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    console, worst = Console(), 0
    for finding in examine(Path.cwd()):
        console.print(
            Text(f"{finding.level:8}", styles[finding.level]), Text(f"{finding.subject:18}", "bold"), finding.text
        )
        worst |= finding.level == "problem"
    return int(worst)
