"""Rank the runs of a task by its metric: before they are registered, and as versions before the gate judges the best.

The split is `promotion.select_on` if all were scored on it, else the split of the promotion test, on which the best of
several is biased upward; `register`, the report, `vlp plan` and `vlp promote` print which. Values on different datasets
are not comparable: runs compete on `tracking.dataset` or, without it, on the datasets that all of them were scored on.
Text-only controls do not compete. A run that was not scored there, such as a stage of a curriculum, comes last and has
no value.

candidates.py ranks versions, by their scores per item; here are the runs, by their scores.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import Params
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.promotion.gate_rule import competing_runs, gate_rule

Scores = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RankedRun:
    """A run that may become its task's champion. value: of the task's metric; None: not scored on that test."""

    run: str
    model: str
    family: str
    variant: str
    seed: int
    scores: Scores
    value: float | None


def best_first(values: Sequence[float | None], direction: str) -> list[int]:
    """Return the positions of the values, best first; None comes last, and equals keep their order."""
    sign = 1.0 if direction == "lower" else -1.0
    scored = [position for position, value in enumerate(values) if value is not None]
    # Stable, so equal runs keep the order of params.yaml; `or 0.0` is for the type checker.
    scored.sort(key=lambda position: sign * (values[position] or 0.0))
    return scored + [position for position, value in enumerate(values) if value is None]


def describe_splits(candidates: str, ranked_on: str, metric: str, promotion: PromotionParams, why: str) -> str:
    """Say on which split candidates are ranked, on which the best is judged, and why if that is the same.

    Args:
        candidates: who is ranked, such as `vqa: runs`.
        why: they are not ranked on `promotion.select_on`; unused if that is the test itself.
    """
    ranked = f"{candidates} are ranked on {ranked_on} by {metric}"
    if ranked_on != promotion.split:
        return f"{ranked}; the best is judged on {promotion.split}"
    if promotion.select_on == promotion.split:
        why = f"`promotion.select_on` is {promotion.select_on}"
    return f"{ranked}, and the best is judged there too ({why}), so its gain is biased upward"


def describe_ranking(params: Params, task: str, scores: Mapping[str, Scores]) -> str:
    """Say on which split the runs of a task are ranked, and on which the best one is judged.

    Args:
        scores: run -> the records of its scores.json, of the competing runs.
    """
    metric, promotion = gate_rule(params, task).metric, params.promotion
    if len(scores) < 2:
        return f"{task}: one run, so nothing is ranked; it is judged on {promotion.split} by {metric}"
    split, values = _split_to_rank_on(promotion, metric, scores)
    if split == promotion.split and not any(values.values()):
        return f"{task}: no run has {metric} on {promotion.split}, so nothing is ranked"
    unselected = []
    for name, by_dataset in values.items():
        # Datasets with a value on the test that lack one on the selection split.
        if by_dataset.keys() - _values(promotion.select_on, metric, scores[name]).keys():
            unselected.append(name)
    why = f"not scored on {promotion.select_on}: {', '.join(unselected)}"
    return describe_splits(f"{task}: runs", split, metric, promotion, why)


def rank_runs(params: Params, workspace: Workspace) -> dict[str, list[RankedRun]]:
    """Return task -> its runs, best first; equal ones and those without a value in the order of params.yaml.

    Raises:
        ParamsError: the runs of a task share no dataset.
        DataError: a run has not been evaluated.
    """
    ranked: dict[str, list[RankedRun]] = {}
    for task in dict.fromkeys(run.task for run in params.finetune.values()):
        names = competing_runs(params, task)
        if not names:
            continue
        scores = {name: read_json(workspace.evaluation(name) / "scores.json") for name in names}
        ranked[task] = [
            RankedRun(
                run=name,
                model=params.model_of(name),
                family=params.family_at(f"finetune/{name}"),
                variant=params.variant_of(name),
                seed=params.finetune[name].seed,
                scores=scores[name],
                value=value,
            )
            for name, value in order_runs(params, task, scores).items()
        ]
    return ranked


def order_runs(params: Params, task: str, scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """Return run -> value of the task's metric, best first; None: not scored on that test.

    Args:
        scores: run -> the records of its scores.json, of the competing runs.

    Raises:
        ParamsError: the runs share no dataset.
    """
    rule = gate_rule(params, task)
    means = _mean_values(task, rule.metric, params.promotion, params.tracking.dataset.get(task), scores)
    names = list(scores)
    # Positions instead of values, because runs without a value are ranked, too.
    order = best_first([means.get(name) for name in names], rule.direction)
    return {names[position]: means.get(names[position]) for position in order}


def _mean_values(
    task: str, metric: str, promotion: PromotionParams, dataset: str | None, scores: Mapping[str, Scores]
) -> dict[str, float]:
    """Return run -> mean of the task's metric over the datasets to compare on; runs that lack one are left out.

    Args:
        dataset: the only one to compare on; None: those that all runs were scored on.
    """
    split = promotion.split
    _, all_values = _split_to_rank_on(promotion, metric, scores)
    # A run without any value on the split does not restrict the datasets.
    values = {name: by_dataset for name, by_dataset in all_values.items() if by_dataset}
    if not values:
        records = [record for run_records in scores.values() for record in run_records]
        if not any(record["metric"] == metric and record["split"] == split for record in records):
            raise ParamsError(
                f"params.yaml: no run of {task} has {metric} on {split}, which versions are compared by; add {split} "
                "to `evaluate.splits`, or set `promotion.split` and `tracking.metric`"
            )
        return {}
    if dataset:
        datasets = {dataset}
        scored = {name for by_dataset in values.values() for name in by_dataset}
        if dataset not in scored:
            raise ParamsError(
                f"params.yaml: tracking.dataset.{task}: no run was scored on `{dataset}` {split}; datasets with "
                f"scores: {', '.join(sorted(scored))}"
            )
    else:
        # Nonempty sets only, so the intersection is that of the runs that were scored.
        datasets = set.intersection(*(set(by_dataset) for by_dataset in values.values()))
        if not datasets:
            listed = "; ".join(f"{name} on {', '.join(by_dataset)}" for name, by_dataset in values.items())
            raise ParamsError(
                f"params.yaml: the runs of {task} were scored on different datasets ({listed}) and cannot be ranked; "
                f"name the dataset to compare on: `tracking.dataset: {{{task}: NAME}}`"
            )
    means = {}
    for name, by_dataset in values.items():
        if datasets <= by_dataset.keys():  # a VCR run of one subtask has no Q->AR
            # `fsum` rounds once, so the order of a set does not change the last digit.
            means[name] = math.fsum(by_dataset[dataset] for dataset in datasets) / len(datasets)
    return means


def _split_to_rank_on(
    promotion: PromotionParams, metric: str, scores: Mapping[str, Scores]
) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the split that ranks, and each run's values there: dataset -> value."""
    judged = {name: _values(promotion.split, metric, records) for name, records in scores.items()}
    selected = {name: _values(promotion.select_on, metric, records) for name, records in scores.items()}
    # Runs with a value on the test for a dataset where they have none on the selection split.
    unselected = [name for name, by_dataset in judged.items() if by_dataset.keys() - selected[name].keys()]
    if unselected or not any(judged.values()):
        return promotion.split, judged  # some runs were not scored on the selection split
    return promotion.select_on, selected


def _values(split: str, metric: str, scores: Scores) -> dict[str, float]:
    """Return dataset -> value of the metric on the split, where it could be computed."""
    return {
        s["dataset"]: float(s["value"])
        for s in scores
        if s["metric"] == metric and s["split"] == split and s["value"] is not None and math.isfinite(s["value"])
    }
