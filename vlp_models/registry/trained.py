"""The MLflow run of the training that made a checkpoint: its curve is there, its scores go there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.registry.logger import KEY

if TYPE_CHECKING:
    from mlflow import MlflowClient


def trained_in(client: MlflowClient, report: Path) -> str:
    """The run's id; empty where MLflow does not have it (any more), or the training was not logged there.

    Args:
        report: what the training wrote of itself (reports/training/finetune/RUN.json).
    """
    try:
        key = str(json.loads(report.read_text(encoding="utf-8")).get("mlflow_key") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    if not key.isalnum():
        return ""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{KEY}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else ""
