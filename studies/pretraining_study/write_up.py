"""Write a study's page from its results and the contrasts that were written down before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining_study.arms import Arm, Pretraining
from pretraining_study.contrasts import INCONCLUSIVE, NOT_COMPARED, REVERSED, SUPPORTED, Finding, Plan, compare
from pretraining_study.measure import METRICS
from pretraining_study.sizes import sizes
from pretraining_study.statistics import detectable

if TYPE_CHECKING:
    from pretraining_study.study import Study

Found = Mapping[str, Mapping[int, dict[str, Any]]]  # arm -> seed -> result
_SAME_TASK = {
    "nll": ("cider", "true"),
    "answer_nll": ("vqa",),
    "match_nll": ("r1",),
}
_TITLES = {SUPPORTED: "Supported", REVERSED: "Reversed", INCONCLUSIVE: "Inconclusive"}


def write_up(
    study: Study,
    plan: Plan,
    findings: Sequence[Finding],
    found: Found,
    text_alone: Mapping[str, Sequence[float]],
) -> str:
    """Return the page. text_alone: metric -> a value for each seed (`measure.text_alone`)."""
    sections = [
        f"# {study.title}",
        _answer(findings),
        "## The contrasts",
        _contrasts(plan, findings, found),
        *_lists(findings, found),
        "## Every arm",
        arm_table(study.arms, found, text_alone),
        "## The other metrics",
        _others(plan, found),
        "## Power",
        _power(plan, findings),
        "## The set-up",
        _setting(study),
        "## Cost",
        _cost(study.arms, found),
    ]
    return "\n\n".join(sections) + "\n"


def _answer(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _TITLES}
    seeds = sorted({f.found.n for f in findings})
    over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"{len(findings)} {'contrast was' if len(findings) == 1 else 'contrasts were'} written down before the runs. "
        f"Over {over} seeds, {counts[SUPPORTED]} {'is' if counts[SUPPORTED] == 1 else 'are'} supported, "
        f"{counts[REVERSED]} reversed and {counts[INCONCLUSIVE]} inconclusive."
    )


def _contrasts(plan: Plan, findings: Sequence[Finding], found: Found) -> str:
    rows = [
        "| question | first - second | difference, 95% interval | smallest that matters | p, Holm | verdict | size |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in findings:
        c = f.contrast
        rows.append(
            f"| {c.question} | {c.first} - {c.second}, {METRICS[c.metric][0]} | "
            f"{_difference(f.found.mean, f.found.half, c.metric)} | {c.smallest:g} | {_p(f.adjusted_p)} | "
            f"**{f.verdict}** | {f.size} |"
        )
    seeds = max(f.found.n for f in findings)
    planned = "" if seeds >= plan.seeds else f" The plan has {plan.seeds} seeds: this is a first part of it."
    expected = "the expected" if all(f.contrast.paper == NOT_COMPARED for f in findings) else "the paper's"
    return "\n".join(rows) + (
        "\n\nDifferences are between the two arms of one seed. NLL is of held-out data: lower is better, so a "
        f"difference below zero favors the first arm. {_measures(plan)}`supported`: the difference has {expected} "
        "direction and p, "
        f"corrected for all {len(findings)} contrasts, is below {plan.alpha:g}. `size` compares the interval, which is "
        f"not corrected, with the smallest difference that matters.{planned}"
    )


_MEANINGS = {
    "nll": "NLL a token: of the references, each token given the image and the tokens before it.",
    "answer_nll": "NLL of answers: of the soft scores of all answers to a question.",
    "match_nll": "NLL of a caption's image: of the images for which a caption is true, among those compared.",
}


def _measures(plan: Plan) -> str:
    used = {contrast.metric for contrast in plan.contrasts}
    return "".join(f"{text} " for metric, text in _MEANINGS.items() if metric in used)


def _lists(findings: Sequence[Finding], found: Found) -> list[str]:
    sections = []
    for verdict, title in _TITLES.items():
        chosen = [f for f in findings if f.verdict == verdict]
        if chosen:
            sections += [f"## {title}", "\n".join(_finding_line(f) + against(f, found) for f in chosen)]
    return sections


def _finding_line(f: Finding) -> str:
    c = f.contrast
    ending = {
        "too small to matter": " Any difference is too small to matter here.",
        "matters": "",
        "may matter": f" It may be larger or smaller than {c.smallest:g}, the smallest that matters.",
    }[f.size]
    paper = "" if c.paper == NOT_COMPARED else f" The paper: {c.paper}."
    return (
        f"- {c.question}{paper} Here: {_difference(f.found.mean, f.found.half, c.metric)} "
        f"({METRICS[c.metric][0]}, {c.first} less {c.second}).{ending}"
    )


def against(f: Finding, found: Found) -> str:
    """Return a warning if the generated output favors the other arm than the likelihood does; empty otherwise.

    A model may assign the references a higher likelihood and still generate worse output, for example after shorter
    fine-tuning.
    """
    c = f.contrast
    values = {arm: {seed: r["test"] for seed, r in rows.items()} for arm, rows in found.items()}
    parts = []
    for metric in _SAME_TASK.get(c.metric, ()) if f.verdict != INCONCLUSIVE else ():
        if all(metric in row for arm in (c.first, c.second) for row in values[arm].values()):
            other = compare(values, c.first, c.second, metric)
            # NLL: lower is better; these: higher is better.
            if abs(other.mean) > other.half and other.mean * f.found.mean > 0:
                parts.append(f"{METRICS[metric][0]} {_difference(other.mean, other.half, metric)}")
    return f" **The generated output favors the other arm**: {'; '.join(parts)}, not corrected." if parts else ""


def arm_table(arms: Sequence[Arm], found: Found, text_alone: Mapping[str, Sequence[float]]) -> str:
    """Means over seeds, with standard deviations over seeds. text_alone: a last row, if it has any metric."""
    metrics = _measured(found)
    rows = [
        "| arm | seeds | " + " | ".join(METRICS[m][0] for m in metrics) + " |",
        "|---" * (2 + len(metrics)) + "|",
    ]
    for arm in arms:
        results = list(found[arm.name].values())
        if not results:
            continue
        cells = []
        for metric in metrics:
            digits, values = METRICS[metric][2], [r["test"][metric] for r in results if metric in r["test"]]
            if not values:
                cells.append("")
                continue
            spread = f" (sd {statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}")
        rows.append(f"| {arm.label} (`{arm.name}`) | {len(results)} | {' | '.join(cells)} |")
    if any(metric in text_alone for metric in metrics):
        cells = [f"{statistics.mean(text_alone[m]):.{METRICS[m][2]}f}" if m in text_alone else "" for m in metrics]
        rows.append(f"| the majority answer to the same question | {len(text_alone['vqa'])} | {' | '.join(cells)} |")
    return "\n".join(rows)


def differences(plan: Plan, found: Found) -> list[dict[str, Any]]:
    """Return, for each pair of arms in the plan, `pair` ("first - second") and metric -> mean and half of the 95%
    interval, for the metrics that all runs of both arms have."""
    values = {arm: {seed: r["test"] for seed, r in rows.items()} for arm, rows in found.items()}
    rows = []
    for first, second in dict.fromkeys((c.first, c.second) for c in plan.contrasts):
        row: dict[str, Any] = {"pair": f"{first} - {second}"}
        for metric in _measured(found):
            if all(metric in one for arm in (first, second) for one in values[arm].values()):
                difference = compare(values, first, second, metric)
                row[metric] = {"mean": difference.mean, "half": difference.half}
        rows.append(row)
    return rows


def finding_rows(plan: Plan, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return a row for each contrast: `number` from 1 on, the difference, p, the verdict and the power."""
    rows = []
    for number, ((c, needed, _), f) in enumerate(zip(plan.power_table(), findings, strict=True), start=1):
        rows.append(
            {
                "number": number,
                "pair": f"{c.first} - {c.second}",
                "metric": c.metric,
                "mean": f.found.mean,
                "half": f.found.half,
                "p": f.adjusted_p,
                "verdict": f.verdict,
                "size": f.size,
                "smallest": c.smallest,
                "planned_deviation": c.deviation,
                "seeds": f.found.n,
                "seeds_needed": needed,
                "deviation": f.found.deviation,
                "detectable": _detectable(plan, f),
            }
        )
    return rows


def _detectable(plan: Plan, f: Finding) -> float | None:
    """The difference found with 80% power; None where all differences are equal."""
    if not f.found.deviation:
        return None
    return detectable(f.found.n, deviation=f.found.deviation, alpha=plan.alpha / len(plan.contrasts))


def _others(plan: Plan, found: Found) -> str:
    metrics = _measured(found)
    rows = [
        "| first - second | " + " | ".join(METRICS[m][0] for m in metrics) + " |",
        "|---" * (1 + len(metrics)) + "|",
    ]
    for row in differences(plan, found):
        cells = [_difference(row[m]["mean"], row[m]["half"], m) if m in row else "" for m in metrics]
        rows.append(f"| {row['pair']} | {' | '.join(cells)} |")
    return (
        "Reported without correction, so without verdicts. R@1 counts any image for which the caption is true.\n\n"
        + "\n".join(rows)
    )


def _measured(found: Found) -> list[str]:
    """The metrics of the tasks that some arm was fine-tuned on."""
    results = [r["test"] for rows in found.values() for r in rows.values()]
    return [metric for metric in METRICS if any(metric in result for result in results)]


def _power(plan: Plan, findings: Sequence[Finding]) -> str:
    worst = plan.alpha / len(plan.contrasts)
    rows = [
        "| first - second | planned: deviation | seeds for 80% | here: deviation | found with 80% |",
        "|---|---|---|---|---|",
    ]
    for (c, needed, _), f in zip(plan.power_table(), findings, strict=True):
        least = _detectable(plan, f)
        rows.append(
            f"| {c.first} - {c.second}, {METRICS[c.metric][0]} | {c.deviation:g} | {needed} | "
            f"{f.found.deviation:.4f} | {math.nan if least is None else least:.4f} |"
        )
    return (
        f"The plan: {plan.seeds} seeds. Deviations are of one seed's difference; where the planned ones came from "
        f"stands in the study's toml. The level is {worst:.4f}, Holm's correction for the smallest of "
        f"{len(plan.contrasts)} p-values.\n\n" + "\n".join(rows)
    )


def _setting(study: Study) -> str:
    s, n = study.setting, study.setting.noise
    seen = (
        f"- Images: the scenes, drawn at {s.side} by {s.side} pixels, without cropping."
        if s.side
        else f"- Regions: symbols of the objects with noise of {s.feature_noise:g}, through a fixed random projection "
        f"to {s.feature_dim} numbers. No detector is used."
    )
    lines = [
        f"- Pretraining: {s.web:,} scenes with one alt text each; {n.mismatched:.0%} of these describe another scene "
        f"and {n.boilerplate:.0%} are wrapped in boilerplate; {n.hypernyms:.0%} of the nouns are hypernyms, "
        f"{n.dropped_words:.0%} of the words are dropped.",
        f"- Target: {s.train} images a seed with five clean captions and {s.questions} questions each; {s.val} images "
        f"for choosing a budget; {s.test} for testing.",
        "- A seed draws the target's images, the weights, the order and the masks. Web, val and test are shared.",
        seen,
        f"- Model: {s.hidden} wide, {s.heads} heads, {_layers(study)}; AdamW at {s.lr:g}, batches of {s.batch}.",
        *(f"- {note}" for note in study.notes),
        "",
        "| arm | pretraining | updates | fine-tuning |",
        "|---|---|---|---|",
    ]
    for arm in study.arms:
        budgets = arm.fine_tuning.budgets
        updates = (
            f"{budgets[0]} updates" if len(budgets) == 1 else f"best on val of {', '.join(map(str, budgets))} updates"
        )
        if arm.fine_tuning.captioner:
            updates += f", with {arm.fine_tuning.written} captions an image generated by another model"
        what = "; then ".join(map(_describe_pretraining, arm.pretraining)) or "none"
        lines.append(f"| {arm.label} (`{arm.name}`) | {what} | {arm.updates} | {updates} |")
    where, script = (
        path.relative_to(study.root) if path.is_relative_to(study.root) else path.name
        for path in (study.contrasts, study.script)
    )
    lines += [
        "",
        f"`python {script}` runs it and writes this page; `--power` shows the power calculation. The contrasts are "
        f"in {where}, all results in {study.figures.relative_to(study.root)}.",
    ]
    return "\n".join(lines)


def _layers(study: Study) -> str:
    """Describe the layers of each family."""
    parts = []
    for family in dict.fromkeys(arm.family for arm in study.arms):
        own = sizes(family, study.setting)
        counts = [f"{name.replace('_', ' ')} {value}" for name, value in own.items() if name.endswith("layers")]
        parts.append(f"{family} with {', '.join(counts)}")
    return "; ".join(parts)


def _describe_pretraining(part: Pretraining) -> str:
    """Describe one pretraining."""
    names = [name.upper() for name in part.objectives]
    if part.mix == "sample":
        parts = "drawn: " + ", ".join(
            f"{s:g} {name}" for s, name in zip(part.shares, part.objectives, strict=True) if s
        )
    else:
        weights = part.weights or (1.0,) * len(names)
        weighed = [name if weight == 1 else f"{weight:g} {name}" for weight, name in zip(weights, names, strict=True)]
        parts = " + ".join(weighed) if part.mix == "sum" else f"{', '.join(weighed)} in turns"
    parts += "" if part.scheduled_sampling == "none" else f", two passes, {part.scheduled_sampling.upper()}"
    of = {"pairs": "", "texts": ", texts alone", "images": ", images alone", "blanked": ", texts without their images"}
    parts += of[part.reads] + (", on the target's own pairs" if part.where == "target" else "")
    frozen = f", frozen: {', '.join(part.frozen).replace('_', ' ')}" if part.frozen else ""
    return f"{parts}{frozen} ({part.updates})"


def cost_rows(arms: Sequence[Arm], found: Found) -> list[dict[str, Any]]:
    """Return a row for each arm that has results: `updates` of its pretraining, and CPU seconds, means over seeds:
    `pretraining`, with the captions that it wrote, and `rest`, fine-tuning and measuring."""
    rows = []
    for arm in arms:
        seconds = [r["seconds"] for r in found[arm.name].values()]
        if seconds:
            pretraining = statistics.mean(s["pretraining"] + s.get("writing", 0.0) for s in seconds)
            rest = statistics.mean(s["fine-tuning"] + s["measuring"] for s in seconds)
            rows.append({"arm": arm.name, "updates": arm.updates, "pretraining": pretraining, "rest": rest})
    return rows


def _cost(arms: Sequence[Arm], found: Found) -> str:
    rows = [
        "| arm | pretraining, CPU s | fine-tuning and measuring, CPU s | budgets chosen |",
        "|---|---|---|---|",
    ]
    labels = {arm.name: arm.label for arm in arms}
    for row in cost_rows(arms, found):
        results = found[row["arm"]].values()
        budgets = [
            f"{task} {'/'.join(map(str, sorted({r['budgets'][task] for r in results})))}"
            for task in next(iter(results))["budgets"]
        ]
        rows.append(f"| {labels[row['arm']]} | {row['pretraining']:.0f} | {row['rest']:.0f} | {', '.join(budgets)} |")
    every = [r for rows in found.values() for r in rows.values()]
    total, load = sum(sum(r["seconds"].values()) for r in every), statistics.mean(r["load"] for r in every)
    commits = {r.get("commit", "") for r in every}
    return (
        f"{len(every)} runs took {total / 60:.0f} CPU minutes, one thread each, at a mean load of {load:.1f}; commit "
        f"{', '.join(sorted(filter(None, commits))) or 'unknown'}.\n\n" + "\n".join(rows)
    )


def summary(arms: Sequence[Arm], found: Found) -> str:
    return arm_table(arms, found, {}) + "\n\n" + (_cost(arms, found) if any(found.values()) else "no run is finished")


def _difference(mean: float, half: float, metric: str) -> str:
    digits = METRICS[metric][2]
    return f"{mean:+.{digits}f} +- {half:.{digits}f}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
