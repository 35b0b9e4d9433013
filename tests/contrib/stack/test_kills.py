"""Each part of a real stack of `vlp up` is killed in the middle of a training, alone and with every other one.

The trainer is a stand-in of seconds; its guard, its MLflow run and its resumption are real, and so is everything above.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from flow_project import break_stage, listening, make_project, set_flow
from prefect_server import free_port
from test_stack import vlp
from unattended_site import ROOT, wait_until

from vlp_models.contrib.stack.keep import NOTICED
from vlp_models.contrib.stack.processes import Stack, flow_processes

STEPS = 30
TRAINER = f"""
import hashlib, json, os, sys, time
from pathlib import Path
from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.log import configure_logging
from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params
from vlp_models.pipeline.guard import guarded
from vlp_models.registry.curve_loggers import log_curves
from vlp_models.registry.mlflow_run import STATE, MLflowRun
from vlp_models.training.log import LOG

configure_logging()
stage, workspace = os.environ["DVC_STAGE"], Workspace(Path.cwd())
try:
    with guarded(workspace, stage):
        work = workspace.work(stage.replace("@", "-"), "0123456789abcdef")
        saved = work / "state.json"
        state = read_json_or_none(saved) or {{"step": 0, "weights": ""}}
        run = MLflowRun(load_params().tracking, workspace.root, work, title=stage, run_params={{}}, tags={{}})
        with log_curves([run], work) as tracker:
            while state["step"] < {STEPS}:
                step = state["step"] + 1
                weights = hashlib.sha256(f"{{state['weights']}} {{step}}".encode()).hexdigest()
                state = {{"step": step, "weights": weights}}
                with (work / LOG).open("a") as log:
                    print(json.dumps({{"step": step, "loss": 1 / step, "time": time.time() * 1000}}), file=log)
                write_json(saved, state)
                print("step", step, flush=True)
                if step == 10:
                    tracker.sync(work / LOG)
                    Path("started").touch()
                    while not Path("killed").exists():
                        time.sleep(0.1)
                time.sleep(0.1)
        Path("weights").write_text(state["weights"])
        for file in (saved, work / STATE, work / LOG):
            file.unlink()
except (KeyboardInterrupt, SystemExit):
    sys.exit(75)
"""
PARTS = ("server", "worker", "keeper", "second-keeper", "engine", "supervisor", "dvc", "trainer")
KILLED = [(part,) for part in PARTS] + list(itertools.combinations(PARTS, 2)) + [PARTS]
WORST = [("worker",), ("worker", "trainer"), ("server",), ("engine",)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as patch:
        project = make_project(folder, patch)
        (project / "flows").symlink_to(ROOT / "flows")
        shutil.copytree(ROOT / "deploy", project / "deploy")
        shutil.copy(ROOT / "prefect.yaml", project)
        (project / "prefect.toml").write_text("[worker]\nquery_seconds = 1\n")
        (project / "trainer.py").write_text(TRAINER)
        break_stage(project, "pretrain", "import trainer")
        assert vlp(project, "up", "--port", str(free_port())).returncode == 0
        yield project
        shown = vlp(project, "down")
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(project)] == []


def find_parts(stack: Stack, flow_run: str) -> dict[str, psutil.Process]:
    """Return part -> process while the trainer of a run is at work."""
    parts = {name: process for name in PARTS[:4] if (process := stack.find(name))}
    (engine,) = [process for process, run in flow_processes(stack).items() if run == flow_run]
    parts["engine"] = engine
    words = {"supervisor": "vlp_models.common.supervise", "dvc": "vlp_models.pipeline.dvc.repro", "trainer": "trainer"}
    for process in engine.children(recursive=True):
        command = process.cmdline()
        for part, word in words.items():
            # `supervise -- python -m ...repro` has both words; a shell above the trainer has none of its own.
            if command[0] == sys.executable and any(word in argument for argument in command[1:3]):
                parts[part] = process
    assert parts.keys() == set(PARTS), parts
    return parts


def forget_training(project: Path) -> None:
    """Make the pretraining stale, and nothing else."""
    lock = project / "dvc.lock"
    if lock.exists():
        content = yaml.safe_load(lock.read_text())
        content["stages"].pop("pretrain@tden", None)
        lock.write_text(yaml.safe_dump(content))
    shutil.rmtree(project / ".dvc" / "cache" / "runs", ignore_errors=True)
    for name in ("started", "killed", "weights", "pretrain-tden"):
        (project / name).unlink(missing_ok=True)


def mlflow_states(project: Path) -> list[tuple[str, int]]:
    with contextlib.closing(sqlite3.connect(project / "mlflow.db")) as database:
        return list(database.execute("select status, count(*) from runs group by status"))


def survive(project: Path, killed: tuple[str, ...]) -> str:
    """Kill some parts in the middle of a training; wait for the end, check it, and return the run's states in order."""
    forget_training(project)
    stack = Stack(project)
    deployment = stack.call("/deployments/name/train/model")["id"]
    run = next(iter(yaml.safe_load((project / "params.yaml").read_text())["finetune"]))
    flow_run = stack.call(f"/deployments/{deployment}/create_flow_run", {"parameters": {"run": run}})["id"]
    wait_until(lambda: (project / "started").exists(), 240)
    parts = find_parts(Stack(project), flow_run)
    (stack.folder / NOTICED).unlink(missing_ok=True)
    for part in killed:
        os.kill(parts[part].pid, signal.SIGKILL)
    (project / "killed").touch()
    if {"keeper", "second-keeper"} <= set(killed):  # as after a reboot
        assert vlp(project, "up").returncode == 0

    def state() -> str:
        stack = Stack(project)
        return str(stack.call(f"/flow_runs/{flow_run}")["state"]["type"]) if stack.is_healthy() else ""

    wait_until(lambda: state() == "COMPLETED", 400)
    assert (project / "weights").read_text() == undisturbed()
    assert {status for status, _ in mlflow_states(project)} == {"FINISHED"}
    wait_until(lambda: all(Stack(project).find(name) for name in PARTS[:4]), 60)
    tasks = stack.call("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    assert {task["state_type"] for task in tasks}.isdisjoint({"RUNNING", "PENDING"})
    wait_until(lambda: not any(process.is_running() for process in (parts["dvc"], parts["trainer"])))
    history = stack.call(f"/flow_run_states/?flow_run_id={flow_run}")
    return " > ".join(entry["name"] for entry in sorted(history, key=lambda entry: str(entry["timestamp"])))


def undisturbed() -> str:
    import hashlib

    weights = ""
    for step in range(1, STEPS + 1):
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
    return weights


@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "killed",
    [pytest.param(parts, id=" + ".join(parts), marks=[] if parts in WORST else pytest.mark.long) for parts in KILLED],
)
def test_a_training_survives_the_parts_of_its_stack(project: Path, killed: tuple[str, ...]) -> None:
    with listening() as webhook:
        set_flow(project, webhook=webhook.url)
        print(" + ".join(killed), ":", survive(project, killed))
        lost = {body["run"] for body in webhook.bodies if body["state"] == "Lost"}
    assert lost == {"server", "worker"}.intersection(killed) or {"keeper", "second-keeper"} <= set(killed)
