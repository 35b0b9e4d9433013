"""What the gate judges a task by: metric, direction, split, datasets and runs. From params.yaml, else the task's own.

Imports no numpy, as `vlp status` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlp_models.errors import VLPError
from vlp_models.params import Params
from vlp_models.params.operations import GateParams

HUMAN = "human"  # a reference point, not a trivial baseline


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """The metric that versions are compared by. datasets: empty for all that a version was scored on."""

    metric: str
    split: str
    datasets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.metric} on {', '.join(self.datasets)}{' ' if self.datasets else ''}{self.split}"


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


def competing_runs(params: Params, task: str) -> list[str]:
    """Return the task's runs that may become its champion: all but text-only controls."""
    return [name for name, run in params.finetune.items() if run.task == task and not run.blank_images]


def gate_spec(params: Params, task: str) -> MetricSpec:
    """Return the metric, split and datasets that the gate reads."""
    dataset = params.tracking.dataset.get(task)
    datasets = (dataset,) if dataset else ()
    return MetricSpec(metric=gate_metric(params, task), split=params.promotion.split, datasets=datasets)


def gate_rule(params: Params, task: str) -> GateParams:
    """Return `promotion.tasks.TASK` with metric and direction filled in: from params.yaml, else the task's own."""
    from vlp_models.tasks.judging import direction_of

    rule, metric = params.promotion.gate(task), gate_metric(params, task)
    direction = rule.direction
    if direction == "task":
        direction = direction_of(task, metric)
    return replace(rule, metric=metric, direction=direction)


def metric_direction(params: Params, task: str, metric: str) -> str:
    """Return which values of any metric of a task are better: `higher` or `lower`."""
    from vlp_models.tasks.judging import direction_of

    rule = gate_rule(params, task)
    return rule.direction if metric == rule.metric else direction_of(task, metric)


def find_best_baseline(record: Mapping[str, Any], direction: str) -> tuple[str, float] | None:
    """Return the name and value of the best baseline of a record, or of its unseen items; what people score is none."""
    # The baselines of unseen items have an interval and a gain as well.
    values = {name: b["value"] if isinstance(b, dict) else b for name, b in record.get("baselines", {}).items()}
    values.pop(HUMAN, None)
    best = min if direction == "lower" else max
    return best(values.items(), key=lambda item: item[1], default=None)
