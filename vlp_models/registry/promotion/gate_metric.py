"""The metric that the gate judges a task by. Imports no numpy, as `vlp status` does not."""

from __future__ import annotations

from vlp_models.errors import VLPError
from vlp_models.params import Params


def gate_metric(params: Params, task: str) -> str:
    """Return the metric that versions of a task are judged by: the gate's, else the tracking's, else the task's own.

    Raises:
        ParamsError: an unknown task, or a plugin that cannot be imported, and params.yaml names no metric for it.
    """
    if metric := params.promotion.gate(task).metric or params.tracking.metric.get(task):
        return metric
    from vlp_models.tasks.judging import judging_of  # imports numpy, and for a plugin its class

    return judging_of(task).metric


def gate_metric_or_empty(params: Params, task: str) -> str:
    """Return the gate's metric to show; empty for a task that cannot be read, such as that of a removed plugin."""
    try:
        return gate_metric(params, task)
    except VLPError:
        return ""
