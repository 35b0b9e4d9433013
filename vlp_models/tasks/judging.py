"""How the gate judges the versions of a task: a copy of attributes of the core's classes, without their imports.

Ranking and promotion need three attributes of a task; its class would import torch, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlp_models.tasks import TASKS, check_task, task_class
from vlp_models.tasks.scoring import CHANCE, CONSTANT, NEAREST


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The attributes of the same names of a `TaskModel` (base.py)."""

    metric: str
    direction: Literal["higher", "lower"] = "higher"
    baselines_to_beat: tuple[str, ...] = ()


CORE = {
    "captioning": Judging(metric="CIDEr", baselines_to_beat=(CONSTANT, NEAREST)),
    "vqa": Judging(metric="accuracy", baselines_to_beat=("majority answer", "per question type", "per question text")),
    "retrieval": Judging(metric="R@1", baselines_to_beat=(CHANCE,)),
}


def judging_of(task: str) -> Judging:
    """Return how versions of a task are judged; the class of a task outside of the core is imported for it.

    Raises:
        ParamsError: unknown task; names the nearest one.
    """
    check_task(task)
    # A plugin may replace a task of the core, and then its own class decides.
    if task in CORE and TASKS[task] == TASKS.builtin[task]:
        return CORE[task]
    definition = task_class(task)
    return Judging(
        metric=definition.metric, direction=definition.direction, baselines_to_beat=tuple(definition.baselines_to_beat)
    )


def direction_of(task: str, metric: str) -> Literal["higher", "lower"]:
    """Return which values of a metric are better: ranks and the own metric of some tasks count down."""
    # `median rank`, also of another direction, fold or language.
    if metric.startswith("median rank"):
        return "lower"
    judging = judging_of(task)
    return judging.direction if metric == judging.metric else "higher"
