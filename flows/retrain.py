"""The pipeline as a Prefect flow. Prefect decides when and what to do on failure; DVC decides what is stale.

Run it without a server:      python -m flows.retrain
As a deployment:              see README, "Unattended"
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import TaskRun
from prefect.states import State

from flows.dvc import WorkspaceBusy, is_stale, preflight, repro
from vlp_models.params import load_params


def _is_busy(task_: Any, run: TaskRun, state: State) -> bool:
    """Retry only what waiting can mend: another DVC process in the same workspace."""
    try:
        state.result()
    except WorkspaceBusy:
        return True
    except Exception:
        return False
    return False


@task(task_run_name="{name}", retries=3, retry_delay_seconds=[10, 30, 60], retry_condition_fn=_is_busy)
def bring_up_to_date(name: str, targets: list[str], root: str) -> bool:
    """`dvc repro` of one part of the pipeline. Returns whether anything ran."""
    logger = get_run_logger()
    path = Path(root)
    if not is_stale(path, targets):
        logger.info("%s: up to date", name)
        return False
    repro(path, targets, logger.info)
    return True


@task(task_run_name="prepare the workspace")
def prepare_workspace(root: str) -> None:
    for line in preflight(Path(root)):
        get_run_logger().warning(line)


@task(task_run_name="publish results")
def publish(root: str) -> None:
    """The validation summary and the result table, as artifacts of this run."""
    reports = Path(root) / "reports"
    validation = reports / "validation.json"
    if validation.exists():
        tables = json.loads(validation.read_text())["tables"]
        rows = [{"table": name, **counts} for name, counts in tables.items()]
        create_table_artifact(rows, key="validation", description="Rows that passed validation, and that did not")
    summary = reports / "summary.json"
    if summary.exists():
        columns = ("task", "run", "dataset", "split", "metric", "value", "low", "high", "n")
        rows = [{name: record.get(name) for name in columns} for record in json.loads(summary.read_text())]
        create_table_artifact(rows, key="results", description=f"Report: {reports / 'index.html'}")


@flow(name="retrain", flow_run_name="retrain")
def retrain(root: str = ".") -> dict[str, bool]:
    """Raw data to registered models: every part of the pipeline, in order, each only if it is stale.

    Args:
        root: the project's folder. A deployment runs in it; leave the default.
    """
    folder = str(Path(root).absolute())
    params = load_params(Path(folder) / "params.yaml")
    runs = list(params.finetune)
    parts: list[tuple[str, list[str]]] = [
        ("validate", ["validate"]),
        ("features", ["shards", "tokenizer"]),
        ("pretrain", ["pretrain"]),
        ("scheduled sampling", ["scheduled_sampling"]),
        *[(f"finetune {run}", [f"finetune@{run}"]) for run in runs],
        ("evaluate", [f"evaluate@{run}" for run in runs]),
        ("register", ["register"]),
        ("report", ["report"]),
    ]
    prepare_workspace(folder)
    ran = {name: bring_up_to_date(name, targets, folder) for name, targets in parts}
    publish(folder)
    if not any(ran.values()):
        get_run_logger().info("nothing was stale; nothing ran")
    return ran


if __name__ == "__main__":
    retrain()
