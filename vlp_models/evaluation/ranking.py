"""Which fine-tuning run of each task is the best, by `tracking.metric` on the test that all of them share.

Numbers of different datasets do not compare: a first lesson scores higher on its simple world than the last one on the
real test. Runs compete on `tracking.dataset`; where it says nothing, on the datasets that all runs of the task were
scored on. Text-only controls do not take part, nor runs that were not scored there, which are steps on the way.
"""

from __future__ import annotations

import math
from typing import Any

from vlp_models.errors import ParamsError
from vlp_models.params import Params
from vlp_models.workspace.paths import Workspace, read_json

Scores = list[dict[str, Any]]


def best_runs(params: Params, workspace: Workspace) -> dict[str, tuple[str, Scores]]:
    """Task -> (run, its scores).

    Raises:
        ParamsError: `tracking` says nothing on a task's metric, or the runs of a task share no dataset.
        DataError: a run has not been evaluated.
    """
    runs: dict[str, dict[str, Scores]] = {}
    for name, finetune in params.finetune.items():
        if not finetune.blank_images:
            runs.setdefault(finetune.task, {})[name] = read_json(workspace.evaluation(name) / "scores.json")
    best = {}
    for task, candidates in runs.items():
        if task not in params.tracking.metric:
            raise ParamsError(f"params.yaml: tracking.metric says nothing about the task {task}")
        values = {name: _values(params, task, scores) for name, scores in candidates.items()}
        values = {name: found for name, found in values.items() if found}  # VCR's subtasks alone lack Q->AR
        if not values:
            _check_scored(params, task, candidates)
            continue
        where = _yardstick(params, task, values)
        ranked = {
            name: math.fsum(found[d] for d in where) / len(where)
            for name, found in values.items()
            if where <= found.keys()
        }
        winner = max(ranked, key=ranked.__getitem__)  # the first of equals, in the order of params.yaml
        best[task] = (winner, candidates[winner])
    return best


def _values(params: Params, task: str, scores: Scores) -> dict[str, float]:
    """Dataset -> the task's metric on the split that promotion looks at, where it could be computed."""
    metric, split = params.tracking.metric[task], params.promotion.split
    return {
        s["dataset"]: float(s["value"])
        for s in scores
        if s["metric"] == metric and s["split"] == split and s["value"] is not None and math.isfinite(s["value"])
    }


def _check_scored(params: Params, task: str, candidates: dict[str, Scores]) -> None:
    metric, split = params.tracking.metric[task], params.promotion.split
    if not any(s["metric"] == metric and s["split"] == split for scores in candidates.values() for s in scores):
        raise ParamsError(
            f"params.yaml: no run of {task} has {metric} on {split}, by which versions are compared; put {split} among "
            "`evaluate.splits`, or set `promotion.split` and `tracking.metric`"
        )


def _yardstick(params: Params, task: str, values: dict[str, dict[str, float]]) -> set[str]:
    wanted = params.tracking.dataset.get(task)
    if wanted:
        if not any(wanted in found for found in values.values()):
            raise ParamsError(
                f"params.yaml: tracking.dataset.{task}: no run was scored on `{wanted}` {params.promotion.split}; "
                f"there are: {', '.join(sorted({d for found in values.values() for d in found}))}"
            )
        return {wanted}
    shared = set.intersection(*(set(found) for found in values.values()))
    if not shared:
        listed = "; ".join(f"{name} on {', '.join(found)}" for name, found in values.items())
        raise ParamsError(
            f"params.yaml: the runs of {task} were scored on different datasets ({listed}), so none is the best; "
            f"name the one that counts: `tracking.dataset: {{{task}: NAME}}`"
        )
    return shared
