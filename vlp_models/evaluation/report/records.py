"""The report's figures as plain records: of every run of params.yaml, of validation and of the detector.

What lies in reports/eval of runs that params.yaml does not have any more is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import SPLITS
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
                "variant": params.variant_of(run),
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
    nothing |= dict.fromkeys(("split", "model", "family", "variant", "note", "git", "data"), "")
    about = {"run": run, "task": run, "dataset": dataset, "metric": metric, "value": value, "n": n}
    return {**nothing, "baselines": {}, "control": False, **about}


def is_headline(record: dict[str, Any]) -> bool:
    """Whether a record is what one wants to see first; the rest is in summary.json and on the page."""
    from vlp_models.tasks import TASKS, task_class

    return record["task"] in TASKS and record["metric"] in task_class(record["task"]).headlines


def _unseen(record: dict[str, Any]) -> str:
    """The value on items whose picture and sentences were not there to learn from."""
    figure = (record.get("seen") or {}).get("without_both")
    return "" if figure is None else f"{figure['value']:.1f}"


def without(figure: dict[str, Any] | None) -> str:
    """A score without what was seen, its interval and what is left of the items."""
    if figure is None:
        return "too few left"
    ends = "" if figure["low"] is None else f" ({figure['low']:.1f} to {figure['high']:.1f})"
    return f"{figure['value']:.1f}{ends}, {figure['n']:,} items"


def print_results(summary: Path) -> None:
    """Prints the main metrics of every run, in percent, with interval and baselines: one table a task and dataset, so
    that runs of all models stand below each other. Of a dataset that was scored on several splits, the last one; the
    others are on the page."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a log has no width of its own; rich would take 80
    places: dict[str, list[dict[str, Any]]] = {}
    for record in _of_last_splits([record for record in read_json(summary) if is_headline(record)]):
        places.setdefault(f"{record['task']}: {record['dataset']} {record['split']}", []).append(record)
    for place, records in places.items():
        order = list(dict.fromkeys(record["metric"] for record in records))
        records.sort(key=lambda record: order.index(record["metric"]))
        table = Table(title=Text(place, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("metric", overflow="fold")
        table.add_column("run", overflow="fold")
        table.add_column("model", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True, min_width=5)
        table.add_column("95% interval", no_wrap=True, min_width=14)
        table.add_column("to compare with", overflow="fold")
        if any(map(_unseen, records)):
            table.add_column("unseen", justify="right", no_wrap=True)
        for record in records:
            compared = "\n".join(f"{name} {value:.1f}" for name, value in sorted(record["baselines"].items()))
            cells = [
                record["metric"],
                record["run"],
                record["model"],
                "-" if record["value"] is None else f"{record['value']:.1f}",
                "" if record["low"] is None else f"{record['low']:.1f} to {record['high']:.1f}",
                record["note"] if record["value"] is None else compared,
                _unseen(record),
            ]
            shown = cells[: len(table.columns)]
            table.add_row(*(Text(cell) for cell in shown))  # Text: a name in brackets is no markup
        console.print(table)


def _of_last_splits(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of test, where a task's dataset was scored on val as well: what runs were chosen on is no result."""
    last: dict[tuple[str, str], str] = {}
    for record in records:
        place = record["task"], record["dataset"]
        last[place] = max(last.get(place, record["split"]), record["split"], key=SPLITS.index)
    return [record for record in records if record["split"] == last[record["task"], record["dataset"]]]
