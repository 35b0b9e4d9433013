"""The report: one self-contained HTML file with all figures of the runs of params.yaml, data quality, leakage and the
gate. Sections whose input files do not exist are left out and listed at the end; folders of contrib add sections.

It opens with the date, the commit and the gate's verdicts, then one large picture next to the main figures and their
baselines, then what was trained on what. The test split comes before val. Long tables and hashes are folded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from vlp_models.common.pages import page_environment
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import SPLITS
from vlp_models.evaluation.report import REPORT_SECTIONS, ReportContext
from vlp_models.evaluation.report.records import (
    CURVES,
    Record,
    flatten,
    format_unseen,
    read_if_exists,
    reads_regions,
)
from vlp_models.evaluation.report.variants import VariantRow, variant_rows
from vlp_models.metrics.bootstrap import MIN_GROUPS, NO_INTERVAL, explain_few
from vlp_models.params import Params
from vlp_models.registry.card import describe_vocabulary
from vlp_models.registry.promotion.gate_rule import HUMAN, find_best_baseline, metric_direction
from vlp_models.registry.promotion.ranking import describe_ranking
from vlp_models.registry.receipts import describe_decision, hash_decisions, read_decisions
from vlp_models.tasks import TASKS, task_class

SMALL_HIDDEN = 512  # a smaller hidden size is reported in a warning
HEADLINES = 3
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
VARIANTS_SHOWN = 3  # with more, the unfolded table has one metric
STORIES_SHOWN = 3  # models; if there are more, all but two are folded
ROWS_SHOWN = 6  # of a table of results before the others are folded


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

    @property
    def test_name(self) -> str:
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
    environment.filters["cost"] = lambda value: "–" if value is None else f"{value:,.0f}"  # a dash: not recorded
    template = environment.get_template("page.html.j2")
    tables = result_tables(params, records)
    main_figures = headlines(tables, params)
    # (task, dataset) -> the split shown unfolded: the last one that was scored, which is test.
    tested: dict[tuple[str, str], str] = {}
    # The tables have the test split before the others, so the first split of a dataset stays.
    for table in tables:
        tested.setdefault((table.task, table.dataset), table.split)
    decisions = read_decisions(workspace.reports)
    context = ReportContext(params=params, workspace=workspace, records=records, missing=missing)
    sections = [import_target(target)(context) for target in REPORT_SECTIONS.values()]
    return template.render(
        title=title(params, records),
        made=time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime()),
        commits=sorted({record["git"] for record in records}),
        verdicts=verdicts(main_figures, decisions),
        few=few_images(tables, params.promotion.split),
        stories=stories(params, workspace),
        data=data_sizes(params, workspace),
        facts=facts(params, workspace, records),
        warnings=warnings(params),
        notes=score_notes(records),
        vocabulary=describe_vocabulary(read_if_exists(workspace.reports / "tokenizer.json")),
        headlines=main_figures,
        tables=tables,
        tested=tested,
        rankings=rankings(params, records),
        validation=validation,
        quarantined=quarantined(workspace),
        repeated=(validation or {}).get("across_splits", {}).get("captions", {}),
        leakage=leakage(params, records),
        has_rules=(workspace.reports / "validation.html").exists(),
        detector=flatten(detector or {}),
        drift=read_if_exists(workspace.reports / "drift.json"),
        decisions=decisions,
        decisions_hash=hash_decisions(decisions),
        sections=sections,
        missing=missing if records else [*missing, "reports/eval: no run has been evaluated"],
        titles={task: task_title(task) for task in decisions},
        METRICS=METRICS,
        BASELINES=BASELINES,
        STORIES_SHOWN=STORIES_SHOWN,
        ROWS_SHOWN=ROWS_SHOWN,
    )


def title(params: Params, records: Sequence[Record]) -> str:
    """Return the heading: which models do which tasks on which data."""
    models = list(dict.fromkeys(params.model_of(run) for run in params.finetune))
    tasks = list(dict.fromkeys(run.task for run in params.finetune.values()))
    if not models or not records:
        return "Vision-language pretraining: results"
    models_text = join_names(models) if len(models) <= 3 else f"{len(models)} models"
    text = join_names([name_task(task) for task in tasks if task in TASKS])
    return f"{text[:1].upper()}{text[1:]} with {models_text}, on {join_names(list(params.data))}"


def task_title(task: str) -> str:
    """Return the heading of a task; its name if the plugin that defines it is gone."""
    return task_class(task).title if task in TASKS else task


def name_task(task: str) -> str:
    """Return a task's title within a sentence; that of a plugin is quoted, because it may be any phrase."""
    text = task_title(task)
    return f"{text[:1].lower()}{text[1:]}" if task in TASKS.builtin else f"“{text}”"


def verdicts(figures: Sequence[Mapping[str, Any]], decisions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one line per task for the top of the page: its main figure, and what the gate last decided."""
    # The first figure of a task is of its own metric.
    first = {figure["task"]: figure for figure in reversed(figures)}
    lines = []
    for task in dict.fromkeys([*(figure["task"] for figure in figures), *decisions]):
        gate = describe_decision(decisions[task]) if task in decisions else ""
        lines.append({"task": task, "title": task_title(task), "figure": first.get(task), "gate": gate})
    return lines


def rate(row: Mapping[str, Any], direction: str) -> tuple[str, str]:
    """Compare a value with its best trivial baseline: a class of the style sheet, and the words."""
    if row["best_baseline"] is None:
        return "", ""
    name, value = row["best_baseline"]
    sign, baseline = -1 if direction == "lower" else 1, f"its best baseline, {name} {value:.1f}"
    # The end of the interval (or of the seeds' range) that is nearer to the baseline.
    end = {"lower": row["high"], "higher": row["low"]}[direction]
    if sign * (row["value"] - value) <= 0:
        return "bad", f"✗ not better than {baseline}"
    if end is not None and sign * (end - value) <= 0:
        return "unclear", f"≈ not clearly better than {baseline}"
    return "good", f"✓ better than {baseline}"


def stories(params: Params, workspace: Workspace) -> list[tuple[str, str]]:
    """Return, for every model with a fine-tuning run: its name, and a sentence on what was trained on what."""
    sentences = []
    for model in dict.fromkeys(params.model_of(run) for run in params.finetune):
        runs = [run for run in params.finetune if params.model_of(run) == model]
        record = read_if_exists(workspace.training(f"finetune/{runs[0]}")) or {}
        size = f", {record['parameters'] / 1e6:,.1f} million parameters" if record.get("parameters") else ""
        pretrainings = [name for name, run in params.pretrain.items() if run.model == model]
        steps = [f"pretrained {_budget(params, workspace, 'pretrain', name)}" for name in pretrainings[:2]]
        if len(pretrainings) > 2:
            steps.append(f"{len(pretrainings) - 2} more pretrainings")
        # Each task is named once, with the budget of its first run that trains.
        budgets: dict[str, str] = {}
        for run in sorted(
            runs, key=lambda run: not (params.finetune[run].max_epochs or params.finetune[run].max_steps)
        ):
            budgets.setdefault(params.finetune[run].task, _budget(params, workspace, "finetune", run))
        tuned = []
        for task, budget in budgets.items():
            tuned.append(f"{name_task(task)} ({budget})")
        steps.append(f"fine-tuned for {join_names(tuned)}")
        # Runs of a task after its first one repeat it with another seed or setting.
        repeats = len(runs) - len(budgets)
        more = f" {repeats} more runs vary the seed or a setting." if repeats > 1 else ""
        sentences.append((model, f"({params.models[model].family}{size}): {', then '.join(steps)}.{more}"))
    return sentences


def _budget(params: Params, workspace: Workspace, kind: str, run: str) -> str:
    """Return `for 2 epochs of 12,496 samples on scenes (masked words, ...)`."""
    settings = getattr(params, kind)[run]
    steps, epochs = settings.max_steps, settings.max_epochs
    text = f"{steps:,} steps" if steps else f"{epochs} epoch{'' if epochs == 1 else 's'}"
    samples = (read_if_exists(workspace.training(f"{kind}/{run}")) or {}).get("train_samples")
    text += f" of {samples:,} samples" if samples else ""
    # Named only where the run uses some of the datasets.
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
        views = {view: n for view, n in counts.get(split, {}).items() if n and view not in ("shards", "regions")}
        images = views.pop("images", 0)
        texts = join_names([f"{n:,} {view.replace('_', ' ')}" for view, n in views.items()])
        if images or texts:
            sizes.append(f"{split} {images:,} images" + (f" with {texts}" if texts else ""))
    return f"Data: {join_names(list(params.data))}; {'; '.join(sizes)}." if sizes else ""


def score_notes(records: Sequence[Record]) -> list[str]:
    """Return what is unusual about scores, each once; those without an interval are one sentence."""
    # A note may hold several remarks, separated by semicolons; runs repeat them.
    parts = {part for r in records if r["value"] is not None for part in r["note"].split("; ") if part}
    without = {part for part in parts if part.startswith(NO_INTERVAL)}
    notes = sorted(parts - without)
    return [*notes, f"{NO_INTERVAL} of scores on fewer than {MIN_GROUPS} test items"] if without else notes


def few_images(tables: Sequence[ResultTable], split: str) -> str:
    """Return a warning if a test set has too few images for an interval; empty otherwise."""
    counts = []
    for table in tables:
        few = [row["few"] for row in table.rows]
        # A number in every row: no metric has enough items for an interval.
        if table.split == split and few and None not in few:
            # Metrics of part of the images have fewer of them than the test set.
            counts.append(max(few))
    return f"{explain_few(min(counts), split)}." if counts else ""


def leakage(params: Params, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the headline scores with the scores without seen items, each with the best baseline on the same items."""
    rows = []
    for record in records:
        leaked = record["leakage"]
        if record["headline"] and record["value"] is not None and leaked:
            direction = metric_direction(params, record["task"], record["metric"])
            names = ("without_images", "without_both")
            rows.append({**record, **{name: format_unseen(leaked[name], direction) for name in names}})
    return rows


def facts(params: Params, workspace: Workspace, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the provenance: commit, data, models, seeds."""

    def join_values(name: str) -> str:
        return ", ".join(sorted({str(record[name]) for record in records})) or "none"

    models = []
    for name, model in params.models.items():
        # the config, and the weights that it starts from
        named = {key: value for key, value in vars(model).items() if key.endswith("init") and value} | model.config
        models.append((f"Model {name}", ", ".join([model.family, *(f"{key} {value}" for key, value in named.items())])))
    manifest = read_if_exists(workspace.shards / "manifest.json") or {}
    return [
        ("Commit", join_values("git")),
        ("Data", join_values("data")),
        *models,
        ("Seeds", join_values("seed")),
        ("Detector", str(manifest.get("detector_id", "unknown")) or "none"),
    ]


def warnings(params: Params) -> list[str]:
    """Return the caveats: synthetic data and tiny models."""
    caveats = []
    # A generator may write several datasets, in sub-folders of its output.
    generated = [Path("data", "raw", name) for name in params.generate]
    synthetic = sorted(
        name for name, source in params.data.items() if any(map(Path(source.root).is_relative_to, generated))
    )
    if synthetic:
        caveats.append(
            f"Synthetic data: {', '.join(synthetic)}. Images and text are generated; these results do not transfer to "
            "photographs."
        )
    hidden = {name: model.config.get("hidden") for name, model in params.models.items()}
    tiny = {name: size for name, size in hidden.items() if isinstance(size, int) and size < SMALL_HIDDEN}
    if tiny:
        sizes = ", ".join(f"{name} {size}" for name, size in tiny.items())
        caveats.append(
            f"Tiny model: hidden size {sizes} (the papers use 768). Compare with the baselines, not with papers."
        )
    return caveats


def result_tables(params: Params, records: Sequence[Record]) -> list[ResultTable]:
    """Return one table per task, dataset and split: test first, variants in the order of params.yaml."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["task"], record["dataset"], record["split"]), []).append(record)
    tables = []
    # Tasks and datasets in the order of the records; of each, test before val before train.
    order = list(dict.fromkeys((task, dataset) for task, dataset, _ in groups))
    for task, dataset, split in sorted(groups, key=lambda p: (order.index(p[:2]), -SPLITS.index(p[2]))):
        group = groups[task, dataset, split]
        rows = [(row, _as_cells(row, metric_direction(params, task, row.metric))) for row in variant_rows(group)]
        definition = task_class(task)
        # Headline metrics come first, the task's own before all others.
        first_metrics = {record["metric"] for record in group if record["headline"]}
        first = [cells for row, cells in rows if row.metric in first_metrics]
        first.sort(key=lambda cells: cells["metric"] != definition.metric)
        if len({cells["variant"] for cells in first}) > VARIANTS_SHOWN:  # only the metric that they are compared by
            first = [cells for cells in first if cells["metric"] == first[0]["metric"]]
        tables.append(
            ResultTable(
                task=task,
                title=definition.title,
                dataset=dataset,
                split=split,
                rows=first or [cells for _, cells in rows],
                details=[cells for _, cells in rows if cells not in first] if first else [],
                costs=list({cells["variant"]: cells for _, cells in rows}.values()),
                absent=_absent(group),
            )
        )
    return tables


def _absent(records: Sequence[Record]) -> list[str]:
    """Return which metrics were not computed, why, and for which runs; those of other decoders are left out."""
    runs_by_reason: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["value"] is None and not record["metric"].endswith(("(greedy)", "(beam)")):
            runs_by_reason.setdefault((record["metric"], record["note"]), []).append(record["run"])
    return [f"{metric}: {note} ({', '.join(runs)})" for (metric, note), runs in sorted(runs_by_reason.items())]


def rankings(params: Params, records: Sequence[Record]) -> list[str]:
    """Return for each task what its runs are ranked on, and what the best one is judged on."""
    scores: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if not record["control"]:
            scores.setdefault(record["task"], {}).setdefault(record["run"], []).append(record)
    texts = {task: describe_ranking(params, task, scores_by_run) for task, scores_by_run in scores.items()}
    return [f"{task_title(task)}: {text.removeprefix(f'{task}: ')}" for task, text in texts.items()]


def headlines(tables: Sequence[ResultTable], params: Params) -> list[dict[str, Any]]:
    """Return the main figures for the top of the page, on the promotion split if it was scored.

    The best variant by each task's own metric, then by further headline metrics that have a trivial baseline. Each
    figure has `bars`: (name, value, percent of the longest bar, style).
    """
    figures_by_table: list[list[dict[str, Any]]] = []
    for table in [table for table in tables if table.split == params.promotion.split] or tables:
        task, figures = task_class(table.task), []
        # The task's own metric, then the other headlines, the last one first.
        for metric in [task.metric, *(name for name in reversed(task.headlines) if name != task.metric)]:
            rows = [row for row in table.rows if row["metric"] == metric and not row["control"]]
            has_trivial = any(set(row["baselines"]) - {HUMAN} for row in rows)
            if rows and (has_trivial or metric == task.metric):
                lower = metric_direction(params, table.task, metric) == "lower"
                best = (min if lower else max)(rows, key=lambda row: row["value"])
                variant = f" · {best['variant']}" if table.variants > 1 else ""
                # The model, then the trivial baselines, best first, then the human.
                bars = [("this model", best["value"], "model")]
                baselines = sorted(best["baselines"].items(), key=lambda item: item[1], reverse=not lower)
                for name, value in sorted(baselines, key=lambda item: item[0] == HUMAN):
                    bars.append((name, value, "human" if name == HUMAN else "trivial"))
                # Percentages share one scale; a bar may be longer for metrics without a maximum, such as CIDEr.
                longest = max(100.0, *(value for _, value, _ in bars))
                unseen = format_unseen(best["unseen"], "lower" if lower else "higher")
                figures.append(
                    {
                        **best,
                        "task": table.task,
                        "title": f"{table.title} · {table.test_name}{variant}",
                        "unseen_text": "; ".join(filter(None, unseen)),
                        "bars": [(name, value, max(0.0, 100 * value / longest), style) for name, value, style in bars],
                    }
                )
        figures_by_table.append(figures)
    # Every table's first figure, then every table's second one, and so on.
    in_turn = [figure for rank in zip_longest(*figures_by_table) for figure in rank if figure is not None]
    # At least one figure per table.
    return in_turn[: max(HEADLINES, len(figures_by_table))]


def quarantined(workspace: Workspace) -> list[tuple[str, str, int]]:
    """Return (table, rule, number of rows) of the quarantine, most frequent first."""
    from vlp_models.data.tables import count_values

    counts = count_values("quarantine", workspace.validated, "table", "rule")
    return [(name, rule, count) for (name, rule), count in counts.most_common()]


def join_names(names: Sequence[str]) -> str:
    """Join names with commas and `and`."""
    if len(names) <= 1:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _as_cells(row: VariantRow, direction: str) -> dict[str, Any]:
    """Return the row with its bar; a gain has none, since it can be negative."""
    cells = {**vars(row), "seeds": row.seeds, "bar": "", "best_baseline": find_best_baseline(vars(row), direction)}
    cells["rating"] = rate(cells, direction)
    if not row.metric.startswith("gain"):
        # At least 100, so that the bars of a table are on one scale; CIDEr may exceed it.
        top = max(100.0, row.value, row.high or 0, *row.baselines.values())
        cells["bar"] = interval_bar(row.value, row.low, row.high, row.baselines, top=top, of_seeds=row.seeds > 1)
    return cells


def interval_bar(
    value: float,
    low: float | None,
    high: float | None,
    baselines: Mapping[str, float],
    *,
    top: float,
    of_seeds: bool = False,
) -> Markup:
    """Draw a value as a bar from 0 to `top`, with its interval as a whisker and baselines as ticks.

    of_seeds: the interval is the range over seeds, not a 95% interval.
    """
    width, height = 220, 22

    def to_x(number: float) -> float:
        # A value beyond `top`, or below 0, ends at the edge.
        return max(0.0, min(1.0, number / top if top else 0.0)) * width

    covered = "seeds" if of_seeds else "95% interval"
    label = f"{value:.1f}"
    if low is not None and high is not None:
        label += f", {covered} {low:.1f} to {high:.1f}"
    label += "".join(f"; {name} {number:.1f}" for name, number in baselines.items())
    # A track of full width, the bar, the whisker with its ends, and one tick per baseline.
    parts = [
        f'<svg class="bar" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>"
        f'<rect class="track" x="0" y="7" width="{width}" height="8" rx="4"/>'
        f'<rect class="fill" x="0" y="7" width="{to_x(value):.1f}" height="8" rx="4"/>'
    ]
    if low is not None and high is not None:
        parts.append(f'<line class="whisker" x1="{to_x(low):.1f}" x2="{to_x(high):.1f}" y1="11" y2="11"/>')
        # The whisker's ends are short vertical lines.
        for end in (low, high):
            parts.append(f'<line class="whisker" x1="{to_x(end):.1f}" x2="{to_x(end):.1f}" y1="7" y2="15"/>')
    parts += [
        f'<line class="baseline" x1="{to_x(number):.1f}" x2="{to_x(number):.1f}" y1="2" y2="20"/>'
        for number in baselines.values()
    ]
    parts.append("</svg>")
    return Markup("".join(parts))
