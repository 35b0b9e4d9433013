"""report: every figure of the run in reports/summary.json, and one page to look at, reports/index.html.

The page needs nothing but itself: style, charts and thumbnails are inside it. Parts whose files are not there are left
out and named at the end.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlp_models.params import Params
from vlp_models.report.charts import interval_bar, line_chart
from vlp_models.report.examples import Examples, read_examples
from vlp_models.report.pictures import Pictures
from vlp_models.report.table import is_headline, print_results
from vlp_models.tasks import TASKS, task_class
from vlp_models.workspace.paths import Workspace, measured, read_json, write_json, write_text

NOT_LOSSES = ("step", "epoch", "lr", "learning_rate", "samples_per_s", "seconds", "gradient_norm")
SMALL_HIDDEN = 512  # below it a warning says that the models are tiny


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    chart: Markup
    lines: list[str]
    last: str


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes summary.json (a list of records), metrics.json (the same, nested for `dvc metrics`) and index.html."""
    with measured(workspace, "report"):
        records = evaluation_records(workspace)
        summary = records + pipeline_records(workspace)
        write_json(workspace.reports / "summary.json", summary)
        write_json(workspace.reports / "metrics.json", nested(summary))
        page = workspace.reports / "index.html"
        write_text(page, render(params, workspace, records))
        print_results(workspace.reports / "summary.json")
        print(f"report {page}")


def evaluation_records(workspace: Workspace) -> list[dict[str, Any]]:
    """The records of every run in reports/eval, by task and name."""
    files = sorted((workspace.reports / "eval").glob("*/scores.json"))
    records = [record for file in files if not file.parent.name.startswith(".") for record in read_json(file)]
    order = list(TASKS)
    return sorted((r for r in records if r["task"] in order), key=lambda record: order.index(record["task"]))


def pipeline_records(workspace: Workspace) -> list[dict[str, Any]]:
    """What validation and the detector reported, as records like the others."""
    records = []
    validation = _optional(workspace.reports / "validation.json")
    for table, found in (validation or {}).get("tables", {}).items():
        for metric in ("rows", "bad_percent"):
            records.append(_record("validation", table, metric, found[metric], found["rows"]))
    detector = _optional(workspace.reports / "detector.json")
    for metric, value in flatten(detector or {}):
        records.append(_record("detector", "", metric, value, 0))
    return records


def flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    """The numbers of nested mappings, by dotted name; lists, texts and truth values are passed over."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flatten(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return [(name, float(value))]
    return []


def nested(records: list[dict[str, Any]]) -> dict[str, Any]:
    """run -> dataset and split -> metric -> value: `dvc metrics show` reads mappings, not lists.

    The headline figures alone: it prints a column for each. summary.json has all.
    """
    result: dict[str, Any] = {}
    for record in records:
        detection = record["run"] == "detector" and record["metric"].rpartition(".")[2] in ("AP", "AP50")
        if record["value"] is not None and (is_headline(record) or detection):
            place = " ".join(part for part in (record["dataset"], record["split"]) if part) or "all"
            result.setdefault(record["run"], {}).setdefault(place, {})[record["metric"]] = record["value"]
    return result


def render(params: Params, workspace: Workspace, records: list[dict[str, Any]]) -> str:
    """The page. Every text of the data is escaped: a caption is whatever someone wrote."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    missing: list[str] = []
    validation = _optional(workspace.reports / "validation.json", missing)
    detector = _optional(workspace.reports / "detector.json", missing)
    environment = Environment(
        loader=PackageLoader("vlp_models.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = number
    template = environment.get_template("page.html.j2")
    return template.render(
        facts=facts(params, workspace, records),
        warnings=warnings(params, records),
        headlines=[record for record in records if is_headline(record)],
        tables=result_tables(records),
        tasks={task: task_class(task).title for task in {record["task"] for record in records}},
        curves=curves(workspace),
        validation=validation,
        quarantined=quarantined(workspace),
        has_docs=(workspace.reports / "data_docs" / "index.html").exists(),
        detector=flatten(detector or {}),
        drift=_optional(workspace.reports / "drift.json"),
        timings=timings(workspace),
        **examples(params, workspace, missing),
        missing=missing if records else [*missing, "reports/eval: no run has been evaluated"],
    )


def facts(params: Params, workspace: Workspace, records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the run was, for the page's head."""

    def of(name: str) -> str:
        return ", ".join(sorted({str(record[name]) for record in records})) or "none"

    manifest = _optional(workspace.shards / "manifest.json") or {}
    sizes = [
        f"{split}: "
        + ", ".join(f"{n:,} {view}" for view, n in counts.items() if n and view not in ("shards", "regions"))
        for split, counts in manifest.get("counts", {}).items()
        if any(counts.values())
    ]
    return [
        ("Commit", of("git")),
        ("Data", of("data")),
        ("Datasets", ", ".join(params.data)),
        ("Sizes", "; ".join(sizes) or "unknown"),
        ("Model", f"{params.model.name}, " + ", ".join(f"{k} {v}" for k, v in params.model.config.items())),
        ("Seeds", of("seed")),
        ("Detector", str(manifest.get("detector_id", "unknown"))),
    ]


def warnings(params: Params, records: list[dict[str, Any]]) -> list[str]:
    """What keeps these figures from meaning more than they do."""
    found = []
    roots = {f"data/raw/{name}" for name in params.generate}
    synthetic = sorted(name for name, source in params.data.items() if source.root.rstrip("/") in roots)
    if synthetic:
        found.append(
            f"Synthetic data: {', '.join(synthetic)}. The images are drawn and the language is generated; "
            "these figures say nothing about photographs."
        )
    hidden = params.model.config.get("hidden")
    if isinstance(hidden, int) and hidden < SMALL_HIDDEN:
        found.append(
            f"Tiny model: hidden size {hidden} (the papers use 768). Compare with the baselines, not with papers."
        )
    notes = sorted({record["note"] for record in records if record["note"] and record["value"] is not None})
    return found + [f"{note[:1].upper()}{note[1:]}." for note in notes]


def result_tables(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One table per task, dataset and split; the metrics' order is that of the scores."""
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        places.setdefault((record["task"], record["dataset"], record["split"]), []).append(record)
    tables = []
    for (task, dataset, split), rows in places.items():
        main = [row for row in rows if row["value"] is not None and not _is_detail(row)]
        order = list(dict.fromkeys(row["metric"] for row in rows))
        main.sort(key=lambda row: (order.index(row["metric"]), row["run"]))
        tables.append(
            {
                "task": task,
                "place": f"{dataset}, {split}",
                "rows": [_with_bar(row) for row in main],
                "details": [_with_bar(row) for row in rows if row["value"] is not None and _is_detail(row)],
                "absent": sorted({_absence(row) for row in rows if row["value"] is None and not _is_detail(row)}),
            }
        )
    return tables


def curves(workspace: Workspace) -> list[Curve]:
    """One chart per file in reports/curves; the loss first, then its parts."""
    result = []
    for file in sorted((workspace.reports / "curves").glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        names = [name for name in (rows[0] if rows else {}) if name and name not in NOT_LOSSES]
        names.sort(key=lambda name: (name != "loss", name != "val_loss", name.startswith("val_")))
        lines = {name: points for name in names if (points := _points(rows, name))}
        if lines:
            first = next(iter(lines.values()))
            last = f"{first[-1][1]:.3f} after {first[-1][0]:,.0f} steps"
            chart = line_chart(lines, f"{file.stem}: {', '.join(lines)} over steps")
            result.append(Curve(name=file.stem, chart=chart, lines=list(lines)[:6], last=last))
    return result


def quarantined(workspace: Workspace) -> list[tuple[str, str, int]]:
    """(table, rule, rows) of what was set aside, the most frequent first."""
    from vlp_models.data.tables import read_table

    table = read_table("quarantine", workspace.validated)
    counts = Counter(zip(table["table"].to_pylist(), table["rule"].to_pylist(), strict=True))
    return [(name, rule, count) for (name, rule), count in counts.most_common()]


def timings(workspace: Workspace) -> list[dict[str, Any]]:
    return [read_json(file) for file in sorted((workspace.root / ".work" / "timings").glob("*.json"))]


def examples(params: Params, workspace: Workspace, missing: list[str]) -> dict[str, list[Examples]]:
    """The galleries; of a task with several runs, the first that is neither a control nor without pretraining."""
    settings = params.evaluate
    pictures = Pictures(workspace, params.validate.max_image_pixels)
    found: list[Examples] = []
    for task in TASKS:
        runs = sorted(
            (name for name, run in params.finetune.items() if run.task == task),
            key=lambda name: (params.finetune[name].blank_images, params.finetune[name].scratch),
        )
        if not runs or task_class(task).gallery is None:
            continue
        one = read_examples(task, workspace, pictures, runs[0], settings.splits, settings.gallery)
        if one is None:
            missing.append(f"reports/eval/{runs[0]}: no predictions")
        else:
            found.append(one)
    return {"galleries": found}


def number(value: float) -> str:
    """With as many digits as say something: counts whole, the rest to two places."""
    return (
        f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:,.2f}".rstrip("0").rstrip(".")
    )


def _is_detail(record: dict[str, Any]) -> bool:
    """Whether the page folds it away: figures by question type, and of greedy decoding."""
    return "question type" in record["metric"] or record["metric"].endswith("(greedy)")


def _absence(record: dict[str, Any]) -> str:
    return f"{record['metric']}: {record['note']}"


def _with_bar(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its bar; a difference has none, since it can lie below zero."""
    value, low, high, baselines = (record[name] for name in ("value", "low", "high", "baselines"))
    if record["metric"].startswith("gain"):
        return {**record, "bar": ""}
    top = max(100.0, value, high or 0, *baselines.values())
    return {**record, "bar": interval_bar(value, low, high, baselines, top=top)}


def _points(rows: list[dict[str, str]], name: str) -> list[tuple[float, float]]:
    points = []
    for row in rows:
        try:
            points.append((float(row["step"]), float(row[name])))
        except (KeyError, TypeError, ValueError):
            continue  # validation losses stand in some rows only
    return points


def _record(run: str, dataset: str, metric: str, value: float, n: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "split": "",
        "model": "",
        "low": None,
        "high": None,
        "baselines": {},
        "seed": None,
        "note": "",
    }
    about = {"seconds": None, "peak_memory_mb": None, "git": "", "data": ""}
    return {**nothing, **about, "run": run, "task": run, "dataset": dataset, "metric": metric, "value": value, "n": n}


def _optional(path: Path, missing: list[str] | None = None) -> Any:
    if path.exists():
        return read_json(path)
    if missing is not None:
        missing.append(f"{path.parent.name}/{path.name}")
    return None
