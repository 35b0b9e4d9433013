"""The report: one self-contained HTML file with all figures of the runs of params.yaml, compared variants, examples,
training curves and data quality. Sections whose input files do not exist are left out and listed at the end.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import RegionInput
from vlp_models.evaluation.ranking import gate_rule
from vlp_models.evaluation.report.charts import interval_bar, line_chart
from vlp_models.evaluation.report.galleries import GALLERIES, Examples, read_examples
from vlp_models.evaluation.report.pictures import Pictures, read_figures
from vlp_models.evaluation.report.records import (
    Record,
    flatten,
    format_without_leaked,
    is_headline,
    read_if_exists,
    reads_regions,
)
from vlp_models.evaluation.report.variants import Comparison, VariantRow, compare, variant_rows
from vlp_models.models.meta_model import model_inputs
from vlp_models.params import Params
from vlp_models.registry.receipts import hash_decisions, read_decisions
from vlp_models.tasks import TASKS, task_class

NOT_LOSSES = ("step", "epoch", "lr", "learning_rate", "samples_per_s", "waiting_share", "seconds", "gradient_norm")
SMALL_HIDDEN = 512  # a smaller hidden size is reported in a warning


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    chart: Markup
    lines: list[str]
    last: str


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """One task, dataset and split. details: rows in a collapsed section. absent: metrics that were not computed."""

    task: str
    title: str
    place: str
    rows: list[dict[str, Any]]
    details: list[dict[str, Any]]
    absent: list[str]
    comparison: Comparison | None


def render(params: Params, workspace: Workspace, records: Sequence[Record]) -> str:
    """Render the HTML. Autoescaping is on: captions and names come from the data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    missing: list[str] = []
    validation = read_if_exists(workspace.reports / "validation.json", missing)
    detector = read_if_exists(workspace.reports / "detector.json", missing) if reads_regions(workspace) else None
    missing += [
        f"reports/eval/{run}: not evaluated" for run in params.finetune if not workspace.evaluation(run).exists()
    ]
    environment = Environment(
        loader=PackageLoader("vlp_models.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["number"] = format_number
    environment.filters["cost"] = format_cost
    template = environment.get_template("page.html.j2")
    tables = result_tables(params, workspace, records)
    decisions = read_decisions(workspace.reports)
    return template.render(
        facts=facts(params, workspace, records),
        warnings=warnings(params, records),
        headlines=headlines(tables, params.promotion.split),
        tables=tables,
        curves=curves(params, workspace),
        validation=validation,
        quarantined=quarantined(workspace),
        repeated=(validation or {}).get("across_splits", {}).get("captions", {}),
        leakage=leakage(records),
        has_docs=(workspace.reports / "data_docs" / "index.html").exists(),
        detector=flatten(detector or {}),
        drift=read_if_exists(workspace.reports / "drift.json"),
        decisions=decisions,
        decisions_hash=hash_decisions(decisions),
        timings=timings(params, workspace),
        galleries=galleries(params, workspace, missing),
        figures=read_figures(params, workspace),
        missing=missing if records else [*missing, "reports/eval: no run has been evaluated"],
    )


def leakage(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the headline scores with the scores without leaked items."""
    chosen = [r for r in records if is_headline(r) and r["value"] is not None and r["leakage"]]
    names = ("without_images", "without_both")
    return [{**r, **{name: format_without_leaked(r["leakage"][name]) for name in names}} for r in chosen]


def facts(params: Params, workspace: Workspace, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return what the page's header lists: commit, data, models, seeds."""

    def of(name: str) -> str:
        return ", ".join(sorted({str(record[name]) for record in records})) or "none"

    manifest = read_if_exists(workspace.shards / "manifest.json") or {}
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
        *(
            (f"Model {name}", ", ".join([model.family, *(f"{k} {v}" for k, v in model.config.items())]))
            for name, model in params.models.items()
        ),
        ("Seeds", of("seed")),
        ("Detector", str(manifest.get("detector_id", "unknown")) or "none"),
    ]


def warnings(params: Params, records: Sequence[Record]) -> list[str]:
    """Return the caveats: synthetic data, tiny models, and notes of the scorers."""
    found = []
    roots = {f"data/raw/{name}" for name in params.generate}
    synthetic = sorted(name for name, source in params.data.items() if source.root.rstrip("/") in roots)
    if synthetic:
        found.append(
            f"Synthetic data: {', '.join(synthetic)}. Images and text are generated; these results do not transfer to "
            "photographs."
        )
    hidden = {name: model.config.get("hidden") for name, model in params.models.items()}
    tiny = {name: size for name, size in hidden.items() if isinstance(size, int) and size < SMALL_HIDDEN}
    if tiny:
        sizes = ", ".join(f"{name} {size}" for name, size in tiny.items())
        found.append(
            f"Tiny model: hidden size {sizes} (the papers use 768). Compare with the baselines, not with papers."
        )
    notes = sorted({record["note"] for record in records if record["note"] and record["value"] is not None})
    return found + [f"{note[:1].upper()}{note[1:]}." for note in notes]


def result_tables(params: Params, workspace: Workspace, records: Sequence[Record]) -> list[ResultTable]:
    """Return one table per task, dataset and split, with metrics in the scores' order and variants in params.yaml's."""
    places: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        places.setdefault((record["task"], record["dataset"], record["split"]), []).append(record)
    tables = []
    for (task, dataset, split), own in places.items():
        rows = [(row, _as_cells(row)) for row in variant_rows(own)]
        definition, rule = task_class(task), gate_rule(params, task)
        tables.append(
            ResultTable(
                task=task,
                title=definition.title,
                place=f"{dataset}, {split}",
                rows=[cells for row, cells in rows if not is_detail(row.metric)],
                details=[cells for row, cells in rows if is_detail(row.metric)],
                absent=sorted(
                    {
                        f"{r['metric']}: {r['note']} ({r['run']})"
                        for r in own
                        if r["value"] is None and not is_detail(r["metric"])
                    }
                ),
                comparison=compare(
                    workspace,
                    own,
                    rule.metric,
                    rule.direction,
                    resamples=params.evaluate.bootstrap,
                ),
            )
        )
    return tables


def headlines(tables: Sequence[ResultTable], split: str) -> list[dict[str, Any]]:
    """Return the headline figures of every variant for the cards at the top: of the promotion split, if scored."""
    tables = [table for table in tables if table.place.endswith(f", {split}")] or tables
    return [
        {**row, "place": table.place}
        for table in tables
        for row in table.rows
        if is_headline({"task": table.task, "metric": row["metric"]}) and not row["control"]
    ]


def curves(params: Params, workspace: Workspace) -> list[Curve]:
    """Return one chart per training of params.yaml with a loss curve; the loss first, then its parts."""
    result = []
    names = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
    for run in names:
        file = workspace.curve(run)
        if not file.exists():
            continue
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        columns = [name for name in (rows[0] if rows else {}) if name and name not in NOT_LOSSES]
        columns.sort(key=lambda name: (name != "loss", name != "val_loss", name.startswith("val_")))
        lines = {name: points for name in columns if (points := _points(rows, name))}
        if lines:
            first = next(iter(lines.values()))
            last = f"{first[-1][1]:.3f} after {first[-1][0]:,.0f} steps"
            chart = line_chart(lines, f"{run}: {', '.join(lines)} over steps")
            result.append(Curve(name=run, chart=chart, lines=list(lines)[:6], last=last))
    return result


def quarantined(workspace: Workspace) -> list[tuple[str, str, int]]:
    """Return (table, rule, number of rows) of the quarantine, most frequent first."""
    from vlp_models.data.tables import read_table

    table = read_table("quarantine", workspace.validated)
    counts = Counter(zip(table["table"].to_pylist(), table["rule"].to_pylist(), strict=True))
    return [(name, rule, count) for (name, rule), count in counts.most_common()]


def timings(params: Params, workspace: Workspace) -> list[dict[str, Any]]:
    """Return the recorded durations of the stages that params.yaml has."""
    runs: dict[str, Mapping[str, Any]] = {
        "pretrain": params.pretrain,
        "finetune": params.finetune,
        "evaluate": params.finetune,
        "initial": params.models,
        "generate": params.generate,
        "prepare": params.data,
    }
    found = [read_json(file) for file in sorted((workspace.root / ".work" / "timings").glob("*.json"))]
    kept = []
    for record in found:
        stage, at, name = str(record["stage"]).partition("@")
        if not at or stage not in runs or name in runs[stage]:
            kept.append(record)
    return kept


def galleries(params: Params, workspace: Workspace, missing: list[str]) -> list[Examples]:
    """Return one gallery per task and model, of its first pretrained run that reads images, else of its first run."""
    settings = params.evaluate
    pictures = Pictures(workspace, params.validate.max_image_pixels)
    with_boxes = Pictures(workspace, params.validate.max_image_pixels, regions=True)
    inputs = dict(zip(params.models, model_inputs(params.models), strict=True))
    found: list[Examples] = []
    for task in TASKS:
        runs: dict[str, list[str]] = {}
        for name, run in params.finetune.items():
            if run.task == task:
                runs.setdefault(params.model_of(name), []).append(name)
        if not runs or task not in GALLERIES:
            continue
        for model, names in runs.items():
            names.sort(key=lambda n: (params.finetune[n].blank_images, params.finetune[n].start.startswith("initial/")))
            shown = with_boxes if isinstance(inputs[model].image, RegionInput) else pictures
            one = read_examples(task, workspace, shown, names[0], settings.splits, settings.gallery, model=model)
            if one is None:
                missing.append(f"reports/eval/{names[0]}: no predictions")
            else:
                found.append(one)
    return found


def is_detail(metric: str) -> bool:
    """Return whether the metric goes to the collapsed section: question types, and decoders other than the chosen."""
    return "question type" in metric or metric.endswith(("(greedy)", "(beam)"))


def format_number(value: float) -> str:
    """Format large counts as integers, other numbers with up to two decimals."""
    return (
        f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:,.2f}".rstrip("0").rstrip(".")
    )


def format_cost(value: float | None) -> str:
    """Format a cost; a dash if it was not recorded."""
    return "–" if value is None else f"{value:,.0f}"


def _as_cells(row: VariantRow) -> dict[str, Any]:
    """Return the row with its bar; a gain has none, since it can be negative."""
    cells = {**vars(row), "seeds": row.seeds, "bar": ""}
    if not row.metric.startswith("gain"):
        top = max(100.0, row.value, row.high or 0, *row.baselines.values())
        cells["bar"] = interval_bar(row.value, row.low, row.high, row.baselines, top=top, of_seeds=row.seeds > 1)
    return cells


def _points(rows: list[dict[str, str]], name: str) -> list[tuple[float, float]]:
    points = []
    for row in rows:
        try:
            points.append((float(row["step"]), float(row[name])))
        except (KeyError, TypeError, ValueError):
            continue  # only some rows have a validation loss
    return points
