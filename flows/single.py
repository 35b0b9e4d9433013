"""The flows beside `retrain`: train one model, evaluate, promote, roll back. Their parameters are the deployments'."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State

from flows.notify import notify
from flows.parts import Part, promotion_part, training_parts
from flows.tasks import HOOKS, run_parts
from vlp_models.cli.presets import apply_overlay
from vlp_models.errors import ParamsError
from vlp_models.params import Params, load_params
from vlp_models.tasks import TASKS

OPTIONS: dict[str, Any] = {"persist_result": False, **HOOKS}


@flow(name="train", flow_run_name="train {run}", **OPTIONS)
def train(run: str, preset: str = "", root: str = ".") -> State[Any]:
    """One fine-tuning run, with whatever it needs that is stale, to its scores. `retrain` registers and promotes.

    Args:
        run: an entry of `finetune` in params.yaml.
        preset: a name in presets/ (without .yaml) to merge into params.yaml first. It stays there, as after `vlp use`.
    """

    def use(params: Params) -> list[Part]:
        _known(run, _runs_with(root, _preset(root, preset)), "finetune run")  # before the preset is merged for good
        return [Part(name=f"use {preset}", kind="validate", command=("use", _preset(root, preset)))]

    def parts(params: Params) -> list[Part]:
        _known(run, list(params.finetune), "finetune run")
        return training_parts(params, [run])

    return run_parts(root, use, parts) if preset else run_parts(root, parts)


@flow(name="evaluate", flow_run_name="evaluate {task} {alias}", **OPTIONS)
def evaluate(task: str, alias: str = "champion", root: str = ".") -> State[Any]:
    """The registered model `alias` of a task, scored on the test split as it is now."""

    def parts(params: Params) -> list[Part]:
        _known(task, list(TASKS), "task")
        _known(alias, ["champion", "challenger", "previous"], "alias")
        return [Part(name=f"evaluate {task} {alias}", kind="evaluate", command=("evaluate-alias", task, alias))]

    return run_parts(root, parts)


@flow(name="promote", flow_run_name="promote {task}", **OPTIONS)
def promote(task: str, root: str = ".") -> State[Any]:
    """Asks the gate about a task's challenger, also when it was asked before."""

    def parts(params: Params) -> list[Part]:
        _known(task, list(TASKS), "task")
        return [promotion_part(params, task)]

    return run_parts(root, parts)


@flow(name="rollback", flow_run_name="rollback {task}", **OPTIONS)
def rollback(task: str, root: str = ".") -> State[Any]:
    """Makes the champion before the present one champion again."""

    def parts(params: Params) -> list[Part]:
        _known(task, list(TASKS), "task")
        return [Part(name=f"rollback {task}", kind="promote", command=("rollback", task))]

    return run_parts(root, parts)


@flow(name="tell", flow_run_name="tell of {run}", persist_result=False)
def tell(run: str, state: str, message: str = "", root: str = ".") -> None:
    """Tells the webhook of a run that could not tell of itself."""
    params = load_params(Path(root) / "params.yaml").flow
    log = get_run_logger().warning
    notify(params, flow="vlp", run=run, state=state, message=message or "see the run's log", bad=True, log=log)


def _runs_with(root: str, preset: str) -> list[str]:
    """The fine-tuning runs of params.yaml once the preset is laid over it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copy(Path(root) / "params.yaml", scratch))
        apply_overlay(copy, Path(root) / preset, [])
        return list(load_params(copy).finetune)


def _known(value: str, known: list[str], what: str) -> None:
    """Parameters come from outside: only names that params.yaml holds reach a command line."""
    if value not in known:
        raise ParamsError(f"{value!r} is no {what}; known: {', '.join(known)}")


def _preset(root: str, name: str) -> str:
    path = Path(root) / "presets" / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name) or not path.exists():
        known = sorted(file.stem for file in (Path(root) / "presets").glob("*.yaml"))
        raise ParamsError(f"{name!r} is no preset; known: {', '.join(known)}")
    return f"presets/{name}.yaml"
