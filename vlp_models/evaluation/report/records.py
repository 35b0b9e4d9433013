"""The report's figures as plain records: of every run of params.yaml, of validation and of the detector.

What lies in reports/eval of runs that params.yaml does not have any more is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.table import is_headline
from vlp_models.params import Params
from vlp_models.tasks import TASKS

Record = dict[str, Any]
COSTS = ("parameters", "samples_seen", "training_seconds", "training_memory_mb")


def evaluation_records(params: Params, workspace: Workspace) -> list[Record]:
    """The records of every evaluated run of params.yaml, by task, in the order of params.yaml, each with what the run
    cost to train."""
    found = []
    for run, finetune in params.finetune.items():
        file = workspace.evaluation(run) / "scores.json"
        if finetune.task in TASKS and file.exists():
            about = {
                "run": run,
                "task": finetune.task,
                "model": params.model_of(run),
                "family": params.family_at(f"finetune/{run}"),
                "design": params.design_of(run),
                "control": finetune.blank_images,
                **costs(params, workspace, f"finetune/{run}"),
            }
            # Evaluations of earlier versions of this program do not say all of it.
            found += [{**record, **about} for record in read_json(file)]
    order = list(TASKS)
    return sorted(found, key=lambda record: order.index(record["task"]))


def costs(params: Params, workspace: Workspace, run: str) -> Record:
    """What a run (`finetune/NAME`) came to: its parameters; samples and seconds of its training and of those that it
    starts from, together; the largest memory of them. None where one of them left no account of it."""
    accounts = [
        optional(workspace.training(checkpoint)) or {}
        for checkpoint in params.chain(run)
        if not checkpoint.startswith("initial/")
    ]

    def along(name: str) -> list[float] | None:
        values = [account.get(name) for account in accounts]
        return None if any(value is None for value in values) else [float(value) for value in values]  # type: ignore[arg-type]

    samples, seconds, memory = along("samples"), along("seconds"), along("peak_memory_mb")
    return {
        "parameters": accounts[0].get("parameters") if accounts else None,
        "samples_seen": None if samples is None else int(math.fsum(samples)),
        "training_seconds": None if seconds is None else round(math.fsum(seconds), 1),
        "training_memory_mb": None if memory is None else max(memory),
    }


def reads_regions(workspace: Workspace) -> bool:
    """Whether any model of the last run does; a report of a detector may be left over from earlier params."""
    return bool((optional(workspace.shards / "manifest.json") or {}).get("detector_id"))


def pipeline_records(workspace: Workspace) -> list[Record]:
    """What validation and the detector reported, as records like the others."""
    records = []
    validation = optional(workspace.reports / "validation.json")
    for table, found in (validation or {}).get("tables", {}).items():
        for metric in ("rows", "bad_percent"):
            records.append(_record("validation", table, metric, found[metric], found["rows"]))
    detector = optional(workspace.reports / "detector.json") if reads_regions(workspace) else None
    for metric, value in flatten(detector or {}):
        records.append(_record("detector", "", metric, value, 0))
    return records


def nested(evaluations: Sequence[Record], pipeline: Sequence[Record]) -> dict[str, Any]:
    """evaluate -> run -> dataset and split -> metric -> value, and the detector's: `dvc metrics show` reads mappings,
    not lists. A run's name is its own among all models.

    The headline figures alone: it prints a column for each. summary.json has all.
    """
    result: dict[str, Any] = {}
    for record in evaluations:
        if record["value"] is not None and is_headline(record):
            place = f"{record['dataset']} {record['split']}"
            runs = result.setdefault("evaluate", {})
            runs.setdefault(record["run"], {}).setdefault(place, {})[record["metric"]] = record["value"]
    for record in pipeline:
        if record["run"] == "detector" and record["metric"].rpartition(".")[2] in ("AP", "AP50"):
            result.setdefault("detector", {})[record["metric"]] = record["value"]
    return result


def flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    """The numbers of nested mappings, by dotted name; lists, texts and truth values are passed over."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flatten(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return [(name, float(value))]
    return []


def optional(path: Path, missing: list[str] | None = None) -> Any:
    """The file's JSON; None where there is no such file, which is then named in `missing`."""
    if path.exists():
        return read_json(path)
    if missing is not None:
        missing.append(f"{path.parent.name}/{path.name}")
    return None


def _record(run: str, dataset: str, metric: str, value: float, n: int) -> Record:
    nothing: Record = dict.fromkeys(("low", "high", "seed", "seconds", "peak_memory_mb", *COSTS))
    nothing |= dict.fromkeys(("split", "model", "family", "design", "note", "git", "data"), "")
    about = {"run": run, "task": run, "dataset": dataset, "metric": metric, "value": value, "n": n}
    return {**nothing, "baselines": {}, "control": False, **about}
