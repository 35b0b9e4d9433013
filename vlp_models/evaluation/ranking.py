"""The fine-tuning runs of each task, best first, by the task's metric on data that all of them share.

The split is `promotion.select_on` if all runs were scored on it, else the split of the promotion test;
`describe_ranking` states which, and `register`, the report, `vlp plan` and `vlp promote` print it. Values on different
datasets are not comparable: runs compete on `tracking.dataset` or, without it, on the datasets that all runs of the
task were scored on. Text-only controls do not compete. A run that was not scored there, such as a stage of a
curriculum, comes last and has no value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import Params
from vlp_models.params.operations import GateParams
from vlp_models.tasks.judging import judging_of

Scores = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that may become its task's champion. value: of the task's metric; None: not scored on that test."""

    run: str
    model: str
    family: str
    variant: str
    seed: int
    scores: Scores
    value: float | None


def rank_runs(params: Params, workspace: Workspace) -> dict[str, list[Candidate]]:
    """Return task -> its runs, best first; equal ones and those without a value in the order of params.yaml.

    Raises:
        ParamsError: the runs of a task share no dataset.
        DataError: a run has not been evaluated.
    """
    candidates: dict[str, list[Candidate]] = {}
    for task in dict.fromkeys(run.task for run in params.finetune.values()):
        scores = {name: read_json(workspace.evaluation(name) / "scores.json") for name in competing_runs(params, task)}
        if scores:
            candidates[task] = _rank(params, task, scores)
    return candidates


def describe_ranking(params: Params, task: str, scores: Mapping[str, Scores]) -> str:
    """Say in one sentence on which split the runs of a task are ranked, and on which the best one is judged.

    Args:
        scores: run -> the records of its scores.json, of the competing runs.
    """
    metric, promotion = gate_rule(params, task).metric, params.promotion
    if len(scores) < 2:
        return f"{task}: one run, so nothing is ranked; it is judged on {promotion.split} by {metric}"
    split, values = _split_to_rank_on(params, metric, scores)
    if split != promotion.split:
        return f"{task}: runs are ranked on {split} by {metric}; the best is judged on {promotion.split}"
    if not any(values.values()):
        return f"{task}: no run has {metric} on {promotion.split}, so nothing is ranked"
    without = []
    for name, by_dataset in values.items():
        if by_dataset.keys() - _values(promotion.select_on, metric, scores[name]).keys():
            without.append(name)
    return ranked_on_the_test(params, task, f"not scored on {promotion.select_on}: {', '.join(without)}")


def ranked_on_the_test(params: Params, task: str, why: str) -> str:
    """Say that the split that ranks is the one that judges, and why.

    Args:
        why: unused if `promotion.select_on` names the test itself.
    """
    promotion = params.promotion
    why = f"`promotion.select_on` is {promotion.select_on}" if promotion.select_on == promotion.split else why
    return (
        f"{task}: runs are ranked on {promotion.split} by {gate_rule(params, task).metric}, and the best is judged "
        f"there too ({why}), so its gain is biased upward"
    )


def competing_runs(params: Params, task: str) -> list[str]:
    """Return the task's runs that may become its champion: all but text-only controls."""
    return [name for name, run in params.finetune.items() if run.task == task and not run.blank_images]


def gate_rule(params: Params, task: str) -> GateParams:
    """Return `promotion.tasks.TASK` with metric and direction filled in: from params.yaml, else the task's own."""
    rule, judging = params.promotion.gate(task), judging_of(task)
    metric = rule.metric or params.tracking.metric.get(task) or judging.metric
    direction = rule.direction
    if direction == "task":
        direction = judging.direction if metric == judging.metric else "higher"
    return replace(rule, metric=metric, direction=direction)


def _rank(params: Params, task: str, scores: Mapping[str, Scores]) -> list[Candidate]:
    rule = gate_rule(params, task)
    metric = rule.metric
    _, values = _split_to_rank_on(params, metric, scores)
    values = {name: by_dataset for name, by_dataset in values.items() if by_dataset}
    means: dict[str, float] = {}  # run -> mean over the datasets; a VCR run of one subtask has no Q->AR
    if values:
        datasets = _shared_datasets(params, task, values)
        for name, by_dataset in values.items():
            if datasets <= by_dataset.keys():
                means[name] = math.fsum(by_dataset[dataset] for dataset in datasets) / len(datasets)
    else:
        _check_scored(params, task, metric, scores)
    # Best first; runs without a value last. The sort is stable, so equal runs stay in the order of params.yaml.
    sign = 1.0 if rule.direction == "lower" else -1.0
    order = sorted(scores, key=lambda name: (name not in means, sign * means.get(name, 0.0)))
    return [
        Candidate(
            run=name,
            model=params.model_of(name),
            family=params.family_at(f"finetune/{name}"),
            variant=params.variant_of(name),
            seed=params.finetune[name].seed,
            scores=scores[name],
            value=means.get(name),
        )
        for name in order
    ]


def _split_to_rank_on(
    params: Params, metric: str, scores: Mapping[str, Scores]
) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the split that ranks, and each run's values there: dataset -> value."""
    promotion = params.promotion
    judged = {name: _values(promotion.split, metric, records) for name, records in scores.items()}
    selected = {name: _values(promotion.select_on, metric, records) for name, records in scores.items()}
    not_selected = [name for name, by_dataset in judged.items() if by_dataset.keys() - selected[name].keys()]
    if not_selected or not any(judged.values()):
        return promotion.split, judged  # some runs were not scored on the selection split
    return promotion.select_on, selected


def _values(split: str, metric: str, scores: Scores) -> dict[str, float]:
    """Return dataset -> value of the metric on the split, where it could be computed."""
    return {
        s["dataset"]: float(s["value"])
        for s in scores
        if s["metric"] == metric and s["split"] == split and s["value"] is not None and math.isfinite(s["value"])
    }


def _check_scored(params: Params, task: str, metric: str, scores: Mapping[str, Scores]) -> None:
    split = params.promotion.split
    records = [record for run_records in scores.values() for record in run_records]
    if not any(record["metric"] == metric and record["split"] == split for record in records):
        raise ParamsError(
            f"params.yaml: no run of {task} has {metric} on {split}, which versions are compared by; add {split} to "
            "`evaluate.splits`, or set `promotion.split` and `tracking.metric`"
        )


def _shared_datasets(params: Params, task: str, values: Mapping[str, Mapping[str, float]]) -> set[str]:
    dataset = params.tracking.dataset.get(task)
    if dataset:
        scored = {name for by_dataset in values.values() for name in by_dataset}
        if dataset not in scored:
            raise ParamsError(
                f"params.yaml: tracking.dataset.{task}: no run was scored on `{dataset}` {params.promotion.split}; "
                f"datasets with scores: {', '.join(sorted(scored))}"
            )
        return {dataset}
    shared = set.intersection(*(set(by_dataset) for by_dataset in values.values()))
    if not shared:
        listed = "; ".join(f"{name} on {', '.join(by_dataset)}" for name, by_dataset in values.items())
        raise ParamsError(
            f"params.yaml: the runs of {task} were scored on different datasets ({listed}) and cannot be ranked; name "
            f"the dataset to compare on: `tracking.dataset: {{{task}: NAME}}`"
        )
    return shared
