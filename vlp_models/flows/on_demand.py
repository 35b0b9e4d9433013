"""Flows for one task at a time: train one run, evaluate, promote, roll back. Their parameters are the deployments'."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State

from vlp_models.cli.presets import find_preset, merge_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.flows.notify import notify
from vlp_models.flows.parts import Part, promotion_part, training_parts
from vlp_models.flows.tasks import HOOKS, run_parts
from vlp_models.params import Params
from vlp_models.pipeline.promotion_commands import ledger_champion
from vlp_models.tasks import TASKS

OPTIONS: dict[str, Any] = {"persist_result": False, **HOOKS}


@flow(name="train", flow_run_name="train {run}", **OPTIONS)
def train(run: str, preset: str = "", root: str = ".") -> State[Any]:
    """Train and evaluate one fine-tuning run, with its stale inputs. `retrain` registers and promotes.

    Args:
        run: an entry of `finetune` in params.yaml.
        preset: the name of a preset to merge into params.yaml first. It stays there, as after `vlp use`.
    """

    def apply_preset(params: Params) -> list[Part]:
        # A parameter may come from anyone who can reach the server, so it must not be the path of a file.
        if not re.fullmatch(r"[\w-]+", preset):
            raise ParamsError(f"{preset!r} is not the name of a preset")
        merged = merge_overlay(Path(root) / "params.yaml", find_preset(preset, Path(root)), [])
        _check_known(run, merged.params.finetune, "finetune run")  # before the preset is merged for good
        return [Part(name=f"use {preset}", kind="validate", command=("use", preset))]

    def parts(params: Params) -> list[Part]:
        _check_known(run, params.finetune, "finetune run")
        return training_parts(params, [run])

    # Two selections: the second one reads the params that the preset has changed.
    return run_parts(root, apply_preset, parts) if preset else run_parts(root, parts)


@flow(name="evaluate", flow_run_name="evaluate {task} {alias}", **OPTIONS)
def evaluate(task: str, alias: str = "champion", root: str = ".") -> State[Any]:
    """Evaluate the registered model `alias` of a task on the current test split."""

    def parts(params: Params) -> list[Part]:
        _check_known(task, TASKS, "task")
        _check_known(alias, ["champion", "challenger", "previous"], "alias")
        return [Part(name=f"evaluate {task} {alias}", kind="evaluate", command=("evaluate-alias", task, alias))]

    return run_parts(root, parts)


@flow(name="promote", flow_run_name="promote {task}", **OPTIONS)
def promote(task: str, root: str = ".") -> State[Any]:
    """Pass a task's challenger through the gate, even if it was judged before."""

    def parts(params: Params) -> list[Part]:
        _check_known(task, TASKS, "task")
        return [promotion_part(task)]

    return run_parts(root, parts)


@flow(name="rollback", flow_run_name="rollback {task}", **OPTIONS)
def rollback(task: str, root: str = ".") -> State[Any]:
    """Restore a task's previous champion, also while another flow uses the workspace: the ledger has its own lock."""

    def parts(params: Params) -> list[Part]:
        _check_known(task, TASKS, "task")
        champion = ledger_champion(params, Workspace(Path(root)), task)
        # With its number a retry cannot roll back twice.
        number = () if champion is None else ("--from", str(champion))
        return [Part(name=f"rollback {task}", kind="promote", command=("rollback", task, *number))]

    return run_parts(root, parts, hold=False)


@flow(name="notify", flow_run_name="notify about {run}", persist_result=False)
def notify_webhook(run: str, state: str, message: str = "", root: str = ".") -> None:
    """Report a crashed run, which could not report itself, to the webhook."""
    message = message or "see the run's log"
    notify(Path(root), get_run_logger().warning, flow="vlp", run=run, state=state, message=message, bad=True)


def _check_known(value: str, names: Iterable[str], kind: str) -> None:
    """Check a flow's parameter: it comes from outside, and only known names may reach a command line."""
    if value not in names:
        raise ParamsError(f"{value!r} is not a {kind}; known: {', '.join(names)}")
