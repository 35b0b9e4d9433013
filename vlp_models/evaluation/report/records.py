"""The report's figures as plain records: of every run of params.yaml, of validation and of the detector.

Evaluations of runs that are no longer in params.yaml are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.variants import COSTS, Record, label_variants
from vlp_models.params import Params
from vlp_models.registry.promotion.gate_rule import find_best_baseline
from vlp_models.tasks import TASKS, task_class

CURVES = {  # column of a curve -> what it is
    "loss": "total",
    "mlm": "masked words",
    "imlm": "masked words, given the image",
    "moc": "masked object classes",
    "mrfr": "masked region features",
    "mvm": "masked visual codes",
    "mim": "masked patches",
    "ism": "image-sentence matching",
    "itm": "image-text matching",
    "itc": "image-text contrast",
    "msg": "masked sentence generation",
    "ic": "captioning",
    "ida": "denoising captions",
    "tifg": "image features from text",
    "vqa": "answers",
    "captioning": "next words",
}


def evaluation_records(params: Params, workspace: Workspace) -> list[Record]:
    """Return the scores of every evaluated run of params.yaml with the run's training cost, by task, in file order."""
    records: list[Record] = []
    variants = label_variants(params)
    for run, finetune in params.finetune.items():
        file = workspace.evaluation(run) / "scores.json"
        if finetune.task in TASKS and file.exists():
            about = {
                "run": run,
                "task": finetune.task,
                "model": params.model_of(run),
                "family": params.family_at(f"finetune/{run}"),
                "variant": variants[run],
                "control": finetune.blank_images,
                **costs(params, workspace, f"finetune/{run}"),
            }
            first = task_class(finetune.task).headlines
            for record in read_json(file):
                # `extra`: of a metric that params.yaml adds
                headline = bool(record.get("extra")) or record["metric"] in first
                records.append({**record, **about, "headline": headline})
    order = list(TASKS)
    # The sort is stable, so a task's runs stay in the order of params.yaml.
    return sorted(records, key=lambda record: order.index(record["task"]))


def costs(params: Params, workspace: Workspace, run: str) -> Record:
    """Return the cost of a run (`finetune/NAME`), including the trainings it starts from.

    Parameters of the run, total samples, total seconds, and the largest peak memory; None for a figure that one of the
    trainings did not record.
    """
    # The run itself first, then the trainings that it starts from.
    trainings = [
        read_if_exists(workspace.training(checkpoint)) or {}
        for checkpoint in params.chain(run)
        if not checkpoint.startswith("initial/")
    ]

    def values(name: str) -> list[float] | None:
        recorded = [float(training[name]) for training in trainings if training.get(name) is not None]
        return recorded if len(recorded) == len(trainings) else None

    samples, seconds, memory = values("samples"), values("seconds"), values("peak_memory_mb")
    return {
        # The first training is the run's own; a model's size is that of the run, not a sum over its chain.
        "parameters": trainings[0].get("parameters") if trainings else None,
        "samples_seen": None if samples is None else int(math.fsum(samples)),
        "training_seconds": None if seconds is None else round(math.fsum(seconds), 1),
        "training_memory_mb": None if memory is None else max(memory),
    }


def reads_regions(workspace: Workspace) -> bool:
    """Return whether any model of the last run reads regions; a detector report may remain from earlier params."""
    return bool((read_if_exists(workspace.shards / "manifest.json") or {}).get("detector_id"))


def pipeline_records(workspace: Workspace) -> list[Record]:
    """Return the figures of validation and of the detector as records."""
    records = []
    validation = read_if_exists(workspace.reports / "validation.json")
    for table, counts in (validation or {}).get("tables", {}).items():
        for metric in ("rows", "bad_percent"):
            records.append(_record("validation", table, metric, counts[metric], counts["rows"]))
    detector = read_if_exists(workspace.reports / "detector.json") if reads_regions(workspace) else None
    for metric, value in flatten(detector or {}):
        records.append(_record("detector", "", metric, value, 0))
    return records


def _record(run: str, dataset: str, metric: str, value: float, n: int) -> Record:
    # The same keys as in a record of an evaluation, so that summary.json is one table.
    empty: Record = dict.fromkeys(("low", "high", "seed", "seconds", "peak_memory_mb", "leakage", *COSTS))
    empty |= dict.fromkeys(("split", "model", "family", "variant", "note", "git", "data"), "")
    about = {"run": run, "task": run, "dataset": dataset, "metric": metric, "value": value, "n": n}
    return {**empty, "baselines": {}, "control": False, "headline": False, **about}


def nested(evaluations: Sequence[Record], pipeline: Sequence[Record]) -> dict[str, Any]:
    """Nest the headline figures as evaluate -> run -> dataset and split -> metric -> value, and the detector's.

    `dvc metrics show` reads nested mappings and prints one column per figure; summary.json has all figures.
    """
    result: dict[str, Any] = {}
    for record in evaluations:
        if record["value"] is not None and record["headline"]:
            test = f"{record['dataset']} {record['split']}"
            runs = result.setdefault("evaluate", {})
            runs.setdefault(record["run"], {}).setdefault(test, {})[record["metric"]] = record["value"]
    for record in pipeline:
        # A figure is `AP`, or `PART.AP`; the others, such as those of each class, are in summary.json.
        if record["run"] == "detector" and record["metric"].rpartition(".")[2] in ("AP", "AP50"):
            result.setdefault("detector", {})[record["metric"]] = record["value"]
    return result


def flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Return the finite numbers of nested mappings by dotted name; lists, texts and booleans are skipped."""
    if isinstance(value, dict):
        # A nested mapping extends the dotted name, a number ends it.
        return [pair for key, inner in value.items() for pair in flatten(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return [(name, float(value))]
    return []


def read_if_exists(path: Path, missing: list[str] | None = None) -> Any:
    """Read a JSON file; None if it does not exist, and its name is then appended to `missing`."""
    if path.exists():
        return read_json(path)
    if missing is not None:
        missing.append(f"{path.parent.name}/{path.name}")
    return None


def format_unseen(figure: Record | None, direction: str) -> tuple[str, str]:
    """Format a score on unseen items, with its interval and their number, and the best baseline on the same items."""
    if figure is None:
        return "–", ""
    text, baseline = f"{_with_interval(figure, '.1f')}, {figure['n']:,} items", find_best_baseline(figure, direction)
    if baseline is None:
        return text, ""
    name, value = baseline
    return text, f"{name} {value:.1f}, gain {_with_interval(figure['baselines'][name]['gain'], '+.1f')}"


def _with_interval(figure: Record, form: str) -> str:
    ends = "" if figure["low"] is None else f" ({figure['low']:{form}} to {figure['high']:{form}})"
    return f"{figure['value']:{form}}{ends}"
