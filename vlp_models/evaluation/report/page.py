"""The report: one self-contained HTML file with all figures of the runs of params.yaml, compared variants, examples,
training curves and data quality. Sections whose input files do not exist are left out and listed at the end.

It opens with what was trained on what, the main figures next to their baselines, and six examples. The test split comes
before val. Long tables, hashes and further examples are folded.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlp_models.common.io import read_json
from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import RegionInput
from vlp_models.data.tables import SPLITS
from vlp_models.evaluation.ranking import describe_ranking, gate_rule
from vlp_models.evaluation.report.charts import MAX_LINES, interval_bar, line_chart
from vlp_models.evaluation.report.galleries import GALLERIES, Examples, choose_highlights, read_examples
from vlp_models.evaluation.report.pictures import Pictures, read_figures
from vlp_models.evaluation.report.records import (
    Record,
    flatten,
    format_without_leaked,
    read_if_exists,
    reads_regions,
)
from vlp_models.evaluation.report.variants import Comparison, VariantRow, compare, variant_rows
from vlp_models.metrics.bootstrap import MIN_GROUPS, NO_INTERVAL, explain_few
from vlp_models.models.meta_model import model_inputs
from vlp_models.params import Params
from vlp_models.registry.receipts import hash_decisions, read_decisions
from vlp_models.tasks import TASKS, task_class

NOT_LOSSES = ("step", "epoch", "lr", "learning_rate", "samples_per_s", "waiting_share", "seconds", "gradient_norm")
SMALL_HIDDEN = 512  # a smaller hidden size is reported in a warning
HEADLINES = 3
HUMAN = "human"  # a reference point, not a trivial baseline
METRICS = {  # what a headline metric is, for readers from elsewhere
    "CIDEr": "agreement with the reference captions, rare words count more",
    "BLEU-4": "sequences of four words shared with the reference captions",
    "METEOR": "words and synonyms shared with the reference captions",
    "faithful captions": "captions that state nothing false of the scene",
    "accuracy": "right answers",
    "consistency": "statements answered right for all of their images",
    "macro F1": "mean F1 of the labels",
    "R@1": "captions whose image is ranked first",
    "R@5": "captions whose image is among the first 5",
    "R@10": "captions whose image is among the first 10",
    "R@1 (image to text)": "images whose caption is ranked first",
    "Q->A": "right answers",
    "QA->R": "right rationales, given the right answer",
    "Q->AR": "right answers with the right rationale",
}
BASELINES = {  # what a baseline is
    "blind baseline": "the same model with every image blanked",
    "majority answer": "the most frequent training answer to everything",
    "per question type": "the most frequent training answer of the question type",
    "per question text": "the most frequent training answer to the same question",
    "majority label": "the most frequent training label",
    "constant caption": "one caption for all images",
    "nearest-neighbor caption": "a caption of the most similar training image",
    HUMAN: "one reference caption, scored against the others; it may be below other baselines, since a metric rewards "
    "the wording that most captions share",
}
CURVES = {  # column of a curve -> what it is
    "loss": "total",
    "mlm": "masked words",
    "imlm": "masked words",
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
VARIANTS_SHOWN = 3  # with more, the unfolded table has one metric
GALLERIES_SHOWN = 4  # before all are folded once more
STORIES_SHOWN = 3  # models; if there are more, all but two are folded
ROWS_SHOWN = 6  # of a table of results before the others are folded
CURVES_SHOWN = 6  # charts; if there are more, all but half of that are folded
COMPARED_SHOWN = 6  # pairs before the table is folded


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One chart: one quantity of one training. legend: (name, number of its color); last: the end of the first line."""

    name: str
    quantity: str
    chart: Markup
    legend: list[tuple[str, int]]
    has_validation: bool
    last: str


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """One task, dataset and split.

    rows     headline metrics; details: all others, in a folded section
    costs    one row per variant
    absent   metrics that were not computed
    """

    task: str
    title: str
    dataset: str
    split: str
    rows: list[dict[str, Any]]
    details: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    absent: list[str]
    comparison: Comparison | None

    @property
    def place(self) -> str:
        return f"{self.dataset}, {self.split}"

    @property
    def variants(self) -> int:
        return len({row["variant"] for row in self.rows})


def render(params: Params, workspace: Workspace, records: Sequence[Record]) -> str:
    """Render the HTML. Autoescaping is on: captions and names come from the data."""
    missing: list[str] = []
    validation = read_if_exists(workspace.reports / "validation.json", missing)
    detector = read_if_exists(workspace.reports / "detector.json", missing) if reads_regions(workspace) else None
    missing += [
        f"reports/eval/{run}: not evaluated" for run in params.finetune if not workspace.evaluation(run).exists()
    ]
    environment = page_environment("vlp_models.evaluation.report")
    environment.filters["cost"] = format_cost
    template = environment.get_template("page.html.j2")
    tables = result_tables(params, workspace, records)
    decisions = read_decisions(workspace.reports)
    examples = galleries(params, workspace, missing)
    return template.render(
        title=title(params, records),
        few=few_images(tables, params.promotion.split),
        stories=stories(params, workspace),
        data=data_sizes(params, workspace),
        facts=facts(params, workspace, records),
        warnings=warnings(params),
        notes=score_notes(records),
        headlines=headlines(tables, params.promotion.split),
        highlights=choose_highlights(examples),
        tables=tables,
        tested=tested_splits(tables),
        rankings=rankings(params, records),
        curves=curves(params, workspace),
        validation=validation,
        quarantined=quarantined(workspace),
        repeated=(validation or {}).get("across_splits", {}).get("captions", {}),
        leakage=leakage(records),
        has_rules=(workspace.reports / "validation.html").exists(),
        detector=flatten(detector or {}),
        drift=read_if_exists(workspace.reports / "drift.json"),
        decisions=decisions,
        decisions_hash=hash_decisions(decisions),
        timings=timings(params, workspace),
        galleries=examples,
        figures=read_figures(params, workspace),
        missing=missing if records else [*missing, "reports/eval: no run has been evaluated"],
        METRICS=METRICS,
        BASELINES=BASELINES,
        GALLERIES_SHOWN=GALLERIES_SHOWN,
        CURVES_SHOWN=CURVES_SHOWN,
        STORIES_SHOWN=STORIES_SHOWN,
        ROWS_SHOWN=ROWS_SHOWN,
        COMPARED_SHOWN=COMPARED_SHOWN,
    )


def title(params: Params, records: Sequence[Record]) -> str:
    """Return the heading: which models do which tasks on which data."""
    models = list(dict.fromkeys(params.model_of(run) for run in params.finetune))
    tasks = list(dict.fromkeys(run.task for run in params.finetune.values()))
    if not models or not records:
        return "Vision-language pretraining: results"
    named = models[0] if len(models) == 1 else join_names(models) if len(models) <= 3 else f"{len(models)} models"
    titles = [task_class(task).title for task in tasks if task in TASKS]
    titles = [name if place == 0 else name[:1].lower() + name[1:] for place, name in enumerate(titles)]
    return f"{join_names(titles)} with {named}, on {join_names(list(params.data))}"


def stories(params: Params, workspace: Workspace) -> list[tuple[str, str]]:
    """Return, for every model with a fine-tuning run: its name, and a sentence on what was trained on what."""
    found = []
    for model in dict.fromkeys(params.model_of(run) for run in params.finetune):
        runs = [run for run in params.finetune if params.model_of(run) == model]
        record = read_if_exists(workspace.training(f"finetune/{runs[0]}")) or {}
        size = f", {record['parameters'] / 1e6:,.1f} million parameters" if record.get("parameters") else ""
        pretrainings = [name for name, run in params.pretrain.items() if run.model == model]
        before = [f"pretrained {_budget(params, workspace, 'pretrain', name)}" for name in pretrainings[:2]]
        before += [f"{len(pretrainings) - 2} more pretrainings"] if len(pretrainings) > 2 else []
        tuned: dict[str, str] = {}
        for run in runs:
            tuned.setdefault(params.finetune[run].task, f"{_budget(params, workspace, 'finetune', run)}")
        listed = [
            f"{(task_class(task).title if task in TASKS else task).lower()} ({text})" for task, text in tuned.items()
        ]
        steps = [*before, f"fine-tuned for {join_names(listed)}"]
        seeds = len(runs) - len(tuned)
        more = f" {seeds} more runs vary the seed or a setting." if seeds > 1 else ""
        found.append((model, f"({params.models[model].family}{size}): {', then '.join(steps)}.{more}"))
    return found


def _budget(params: Params, workspace: Workspace, kind: str, run: str) -> str:
    """Return `for 2 epochs of 12,496 samples on scenes (masked words, ...)`."""
    settings = getattr(params, kind)[run]
    steps, epochs = settings.max_steps, settings.max_epochs
    text = f"{steps:,} steps" if steps else f"{epochs} epoch{'s' if epochs > 1 else ''}"
    samples = (read_if_exists(workspace.training(f"{kind}/{run}")) or {}).get("train_samples")
    text += f" of {samples:,} samples" if samples else ""
    if settings.sources and set(settings.sources) != set(params.data):
        text += f" of {join_names(list(settings.sources))}"
    if kind == "pretrain":
        text = f"for {text} on {join_names([CURVES.get(name, name) for name in settings.recipe.objectives])}"
    return text


def data_sizes(params: Params, workspace: Workspace) -> str:
    """Return how many images and texts the splits have, as a sentence; empty if there are no shards."""
    counts = (read_if_exists(workspace.shards / "manifest.json") or {}).get("counts", {})
    sizes = []
    for split in ("train", "test", "val"):
        own = {view: n for view, n in counts.get(split, {}).items() if n and view not in ("shards", "regions")}
        images = own.pop("images", 0)
        others = join_names([f"{n:,} {view.replace('_', ' ')}" for view, n in own.items()])
        if images or others:
            sizes.append(f"{split} {images:,} images" + (f" with {others}" if others else ""))
    return f"Data: {join_names(list(params.data))}; {'; '.join(sizes)}." if sizes else ""


def tested_splits(tables: Sequence[ResultTable]) -> dict[tuple[str, str], str]:
    """Return (task, dataset) -> the split shown unfolded: the last one that was scored, which is test."""
    found: dict[tuple[str, str], str] = {}
    for table in tables:
        found.setdefault((table.task, table.dataset), table.split)
    return found


def score_notes(records: Sequence[Record]) -> list[str]:
    """Return what is unusual about scores, each once; those without an interval are one sentence."""
    parts = {part for r in records if r["value"] is not None for part in r["note"].split("; ") if part}
    without = {part for part in parts if part.startswith(NO_INTERVAL)}
    found = sorted(parts - without)
    return [*found, f"{NO_INTERVAL} of scores on fewer than {MIN_GROUPS} test items"] if without else found


def few_images(tables: Sequence[ResultTable], split: str) -> str:
    """Return a warning if a test set has too few images for an interval; empty otherwise."""
    found = [[row["few"] for row in table.rows] for table in tables if table.split == split]
    # metrics of part of the images have fewer of them than the test set
    counts = [max(few) for few in found if few and None not in few]
    return f"{explain_few(min(counts), split)}." if counts else ""


def leakage(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the headline scores with the scores without leaked items."""
    chosen = [r for r in records if r["headline"] and r["value"] is not None and r["leakage"]]
    names = ("without_images", "without_both")
    return [{**r, **{name: format_without_leaked(r["leakage"][name]) for name in names}} for r in chosen]


def facts(params: Params, workspace: Workspace, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the provenance: commit, data, models, seeds."""

    def of(name: str) -> str:
        return ", ".join(sorted({str(record[name]) for record in records})) or "none"

    manifest = read_if_exists(workspace.shards / "manifest.json") or {}
    return [
        ("Commit", of("git")),
        ("Data", of("data")),
        *(
            (f"Model {name}", ", ".join([model.family, *(f"{k} {v}" for k, v in model.config.items())]))
            for name, model in params.models.items()
        ),
        ("Seeds", of("seed")),
        ("Detector", str(manifest.get("detector_id", "unknown")) or "none"),
    ]


def warnings(params: Params) -> list[str]:
    """Return the caveats: synthetic data and tiny models."""
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
    return found


def result_tables(params: Params, workspace: Workspace, records: Sequence[Record]) -> list[ResultTable]:
    """Return one table per task, dataset and split: test first, variants in the order of params.yaml."""
    places: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        places.setdefault((record["task"], record["dataset"], record["split"]), []).append(record)
    tables = []
    order = list(dict.fromkeys((task, dataset) for task, dataset, _ in places))
    for task, dataset, split in sorted(places, key=lambda p: (order.index(p[:2]), -SPLITS.index(p[2]))):
        own = places[task, dataset, split]
        rows = [(row, _as_cells(row)) for row in variant_rows(own)]
        first_metrics = {record["metric"] for record in own if record["headline"]}
        first = [cells for row, cells in rows if row.metric in first_metrics]
        first.sort(key=lambda cells: cells["metric"] != task_class(task).metric)
        if len({cells["variant"] for cells in first}) > VARIANTS_SHOWN:  # only the metric that they are compared by
            first = [cells for cells in first if cells["metric"] == first[0]["metric"]]
        definition, rule = task_class(task), gate_rule(params, task)
        tables.append(
            ResultTable(
                task=task,
                title=definition.title,
                dataset=dataset,
                split=split,
                rows=first or [cells for _, cells in rows],
                details=[cells for _, cells in rows if cells not in first] if first else [],
                costs=list({cells["variant"]: cells for _, cells in rows}.values()),
                absent=_absent(own),
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


def _absent(records: Sequence[Record]) -> list[str]:
    """Return which metrics were not computed, why, and for which runs; those of other decoders are left out."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["value"] is None and not record["metric"].endswith(("(greedy)", "(beam)")):
            found.setdefault((record["metric"], record["note"]), []).append(record["run"])
    return [f"{metric}: {note} ({', '.join(runs)})" for (metric, note), runs in sorted(found.items())]


def rankings(params: Params, records: Sequence[Record]) -> list[str]:
    """Return for each task what its runs are ranked on, and what the best one is judged on."""
    scores: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if not record["control"]:
            scores.setdefault(record["task"], {}).setdefault(record["run"], []).append(record)
    return [describe_ranking(params, task, own) for task, own in scores.items()]


def headlines(tables: Sequence[ResultTable], split: str) -> list[dict[str, Any]]:
    """Return the main figures for the top of the page, on the promotion split if it was scored.

    The best variant by each task's own metric, then by further headline metrics that have a trivial baseline.
    """
    chosen = [table for table in tables if table.split == split] or tables
    ranked: list[list[dict[str, Any]]] = []
    for table in chosen:
        rule, own = task_class(table.task), []
        for metric in [rule.metric, *(name for name in reversed(rule.headlines) if name != rule.metric)]:
            rows = [row for row in table.rows if row["metric"] == metric and not row["control"]]
            trivial = [row for row in rows if set(row["baselines"]) - {HUMAN}]
            if rows and (trivial or metric == rule.metric):
                lower = metric == "median rank" or (metric == rule.metric and rule.direction == "lower")
                best = (min if lower else max)(rows, key=lambda row: row["value"])
                shown = f" · {best['variant']}" if table.variants > 1 else ""
                own.append({**best, "title": f"{table.title} · {table.place}{shown}", "bars": _bars(best)})
        ranked.append(own)
    deepest = max(map(len, ranked), default=0)
    found = [own[place] for place in range(deepest) for own in ranked if place < len(own)]
    return found[: max(HEADLINES, len(ranked))]


def _bars(row: Mapping[str, Any]) -> list[tuple[str, float, float, str]]:
    """Return (name, value, percent of the longest bar, style) of the model, its trivial baselines and a human."""
    values = [("this model", row["value"], "model")]
    values += [
        (n, v, "human" if n == HUMAN else "trivial") for n, v in sorted(row["baselines"].items(), key=_last_human)
    ]
    top = max(100.0, *(value for _, value, _ in values))
    return [(name, value, max(0.0, 100 * value / top), style) for name, value, style in values]


def _last_human(item: tuple[str, float]) -> tuple[bool, float]:
    return item[0] == HUMAN, -item[1]


def curves(params: Params, workspace: Workspace) -> list[Curve]:
    """Return the charts of every training of params.yaml: its losses, its accuracies, and any other quantity alone."""
    result, palette = [], dict[str, int]()
    for run in [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]:
        file = workspace.curve(run)
        if not file.exists():
            continue
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        kind, _, name = run.partition("/")
        settings = getattr(params, kind)[name]
        parts = [*settings.recipe.objectives] if kind == "pretrain" else [settings.task]
        columns = {
            column: points
            for column in (rows[0] if rows else {})
            if column and column not in NOT_LOSSES and (points := _points(rows, column))
        }
        if len(parts) == 1 and columns.get(parts[0]) == columns.get("loss"):
            columns.pop(parts[0], None)  # the only part is the total
            columns.pop(f"val_{parts[0]}", None)
        quantities: dict[str, dict[str, list[tuple[float, float]]]] = {"Loss": {}, "Accuracy, %": {}}
        for column in sorted(columns, key=lambda column: (column != "loss", column.startswith("val_"))):
            own = column.removeprefix("val_")
            if own == "loss" or own in parts:
                quantities["Loss"][column] = columns[column]
            elif own.endswith("_accuracy"):
                quantities["Accuracy, %"][column] = [(x, 100 * y) for x, y in columns[column]]
            else:
                quantities.setdefault(own.replace("_", " ").capitalize(), {})[column] = columns[column]
        result += [_curve(run, quantity, lines, palette) for quantity, lines in quantities.items() if lines]
    return result


def _curve(
    run: str, quantity: str, lines: Mapping[str, Sequence[tuple[float, float]]], palette: dict[str, int]
) -> Curve:
    """Draw one quantity; the validation has the color of its training and is dashed.

    Args:
        palette: objective -> number of its color in the charts before; new ones are added.
    """
    names = list(dict.fromkeys(column.removeprefix("val_") for column in lines))
    numbers = _choose_colors([name.removesuffix("_accuracy") for name in names], palette)
    colors = {column: numbers[names.index(column.removeprefix("val_"))] for column in lines}
    shown = {name: CURVES.get(part := name.removesuffix("_accuracy"), part.replace("_", " ")) for name in names}
    drawn = {
        f"{shown[column.removeprefix('val_')]}{', validation' if column.startswith('val_') else ''}": points
        for column, points in lines.items()
    }
    step, value = next(iter(lines.values()))[-1]
    return Curve(
        name=run,
        quantity=quantity,
        chart=line_chart(drawn, f"{run}: {quantity} over steps", dict(zip(drawn, colors.values(), strict=True))),
        legend=[(shown[name], number) for name, number in zip(names, numbers, strict=True) if number < MAX_LINES],
        has_validation=any(column.startswith("val_") for column in lines),
        last=f"{value:,.2f} after {step:,.0f} steps",
    )


def _choose_colors(objectives: Sequence[str], palette: dict[str, int]) -> list[int]:
    """Return a color number for each line of a chart: the objective's own, unless another line of the chart has it."""
    chosen: list[int] = []
    for name in objectives:
        number = palette.get(name)
        if number is None or number in chosen:
            taken = {*chosen, *(palette[other] for other in objectives if other in palette)}
            free = [color for color in range(MAX_LINES) if color not in taken]
            known = list(palette.values())
            number = min(free, key=lambda color: (known.count(color), color), default=MAX_LINES)
        if number < MAX_LINES:
            palette.setdefault(name, number)
        chosen.append(number)
    return chosen


def quarantined(workspace: Workspace) -> list[tuple[str, str, int]]:
    """Return (table, rule, number of rows) of the quarantine, most frequent first."""
    from vlp_models.data.tables import count_values

    counts = count_values("quarantine", workspace.validated, "table", "rule")
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
            splits = sorted(settings.splits, key=lambda split: (split != params.promotion.split, -SPLITS.index(split)))
            one = read_examples(task, workspace, shown, names[0], splits, settings.gallery, model=model)
            if one is None:
                missing.append(f"reports/eval/{names[0]}: no predictions")
            else:
                found.append(one)
    return found


def join_names(names: Sequence[str]) -> str:
    """Join names with commas and `and`."""
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1] if names else ""


def format_cost(value: float | None) -> str:
    """Format a cost; a dash if it was not recorded."""
    return "–" if value is None else f"{value:,.0f}"


def _as_cells(row: VariantRow) -> dict[str, Any]:
    """Return the row with its bar; a gain has none, since it can be negative."""
    trivial = {name: value for name, value in row.baselines.items() if name != HUMAN}
    lower = row.metric.startswith("median rank")
    best = (min if lower else max)(trivial.items(), key=lambda item: item[1], default=None)
    cells = {**vars(row), "seeds": row.seeds, "bar": "", "best_baseline": best}
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
