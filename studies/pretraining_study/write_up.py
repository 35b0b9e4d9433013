"""A study's document, made of its results and of the contrasts as they were written down before."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining_study.arms import Arm, Pretraining
from pretraining_study.contrasts import CANNOT_TELL, HOLDS, OPPOSITE, Finding, Plan, compare
from pretraining_study.measure import METRICS
from pretraining_study.sizes import sizes
from pretraining_study.statistics import detectable

if TYPE_CHECKING:
    from pretraining_study.study import Study

Found = Mapping[str, Mapping[int, dict[str, Any]]]  # arm -> seed -> result
_SAME_TASK = {"nll": ("cider", "true"), "answer_nll": ("vqa",), "match_nll": ("r1",)}  # likelihood -> what is said
_AS_FOUND = {HOLDS: "What holds", OPPOSITE: "What is the other way round", CANNOT_TELL: "What can't be told"}


def write_up(study: Study, plan: Plan, findings: Sequence[Finding], found: Found) -> str:
    sections = [
        f"# {study.title}",
        _answer(findings),
        "## The contrasts",
        _contrasts(plan, findings, found),
        *_lists(findings, found),
        "## Every arm",
        arm_table(study.arms, found),
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
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _AS_FOUND}
    seeds = sorted({f.found.n for f in findings})
    over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"{len(findings)} {'contrast was' if len(findings) == 1 else 'contrasts were'} written down before the runs. "
        f"Over {over} seeds {counts[HOLDS]} "
        f"{'holds' if counts[HOLDS] == 1 else 'hold'}, {counts[OPPOSITE]} "
        f"{'is' if counts[OPPOSITE] == 1 else 'are'} the other way round, and {counts[CANNOT_TELL]} can't be told."
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
    planned = "" if seeds >= plan.seeds else f" The plan asks for {plan.seeds} seeds: this is a first part of it."
    return "\n".join(rows) + (
        "\n\nDifferences are of the same seed's two arms. An NLL is of what is held out: less is better, so a "
        f"difference below zero speaks for the first arm. {_measures(plan)}`holds`: the difference has the paper's "
        "direction and p, "
        f"corrected for all {len(findings)} contrasts, is below {plan.alpha:g}. `size` compares the interval, which is "
        f"not corrected, with the smallest difference that matters.{planned}"
    )


_MEANINGS = {
    "nll": "NLL a token: of the references, each token given the image and those before it.",
    "answer_nll": "NLL of answers: of the soft scores of all answers to a question.",
    "match_nll": "NLL of a caption's image: of the images of which a caption is true, among those that it is compared "
    "with.",
}


def _measures(plan: Plan) -> str:
    used = {contrast.metric for contrast in plan.contrasts}
    return "".join(f"{text} " for metric, text in _MEANINGS.items() if metric in used)


def _lists(findings: Sequence[Finding], found: Found) -> list[str]:
    sections = []
    for verdict, title in _AS_FOUND.items():
        chosen = [f for f in findings if f.verdict == verdict]
        if chosen:
            sections += [f"## {title}", "\n".join(_told(f) + against(f, found) for f in chosen)]
    return sections


def _told(f: Finding) -> str:
    c = f.contrast
    ending = {
        "too small to matter": " Whatever the difference is, it is too small to matter here.",
        "matters": "",
        "may matter": f" It may be larger or smaller than {c.smallest:g}, the smallest that matters.",
    }[f.size]
    return (
        f"- {c.question} The paper: {c.paper}. Here: {_difference(f.found.mean, f.found.half, c.metric)} "
        f"({METRICS[c.metric][0]}, {c.first} less {c.second}).{ending}"
    )


def against(f: Finding, found: Found) -> str:
    """That what is said speaks for the other arm than what is likely does; empty: it does not.

    A model may give the references more and still say worse things: it was fine-tuned for less long, say.
    """
    c = f.contrast
    values = {arm: {seed: r["test"] for seed, r in rows.items()} for arm, rows in found.items()}
    told = []
    for metric in _SAME_TASK.get(c.metric, ()) if f.verdict != CANNOT_TELL else ():
        if all(metric in row for arm in (c.first, c.second) for row in values[arm].values()):
            other = compare(values, c.first, c.second, metric)
            # Of an NLL less is better, of these more.
            if abs(other.mean) > other.half and other.mean * f.found.mean > 0:
                told.append(f"{METRICS[metric][0]} {_difference(other.mean, other.half, metric)}")
    return f" **What is said speaks for the other arm**: {'; '.join(told)}, not corrected." if told else ""


def arm_table(arms: Sequence[Arm], found: Found) -> str:
    """Means over seeds, with standard deviations over seeds."""
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
    return "\n".join(rows)


def _others(plan: Plan, found: Found) -> str:
    values = {arm: {seed: r["test"] for seed, r in rows.items()} for arm, rows in found.items()}
    metrics = _measured(found)
    rows = [
        "| first - second | " + " | ".join(METRICS[m][0] for m in metrics) + " |",
        "|---" * (1 + len(metrics)) + "|",
    ]
    for first, second in dict.fromkeys((c.first, c.second) for c in plan.contrasts):
        cells = []
        for metric in metrics:
            if not all(metric in row for arm in (first, second) for row in values[arm].values()):
                cells.append("")
                continue
            difference = compare(values, first, second, metric)
            cells.append(_difference(difference.mean, difference.half, metric))
        rows.append(f"| {first} - {second} | {' | '.join(cells)} |")
    return (
        "Looked at besides, not corrected for their number, so no verdicts. R@1 counts any image of which the caption "
        "is true.\n\n" + "\n".join(rows)
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
        least = detectable(f.found.n, deviation=f.found.deviation, alpha=worst) if f.found.deviation else math.nan
        rows.append(
            f"| {c.first} - {c.second}, {METRICS[c.metric][0]} | {c.deviation:g} | {needed} | "
            f"{f.found.deviation:.4f} | {least:.4f} |"
        )
    return (
        f"The plan: {plan.seeds} seeds. Deviations are of one seed's difference; those of the plan came from other "
        f"seeds. The level is {worst:.4f}, what Holm's correction asks of the smallest of {len(plan.contrasts)} "
        "p-values.\n\n" + "\n".join(rows)
    )


def _setting(study: Study) -> str:
    s, n = study.setting, study.setting.noise
    seen = (
        f"- Images: the scenes, drawn at {s.side} by {s.side} pixels, and nothing is cropped."
        if s.side
        else f"- Regions: symbols of the objects with noise of {s.feature_noise:g}, through a fixed random projection "
        f"to {s.feature_dim} numbers. There is no detector."
    )
    lines = [
        f"- Pretraining: {s.web:,} scenes with one alt text each, of which {n.mismatched:.0%} describe another scene "
        f"and {n.boilerplate:.0%} stand in boilerplate; {n.hypernyms:.0%} of the nouns are hypernyms, "
        f"{n.dropped_words:.0%} of the words are lost.",
        f"- Target: {s.train} images a seed with five clean captions and {s.questions} questions each; {s.val} images "
        f"to choose a budget by; {s.test} to measure on.",
        "- A seed draws the target's images, the weights, the order and the masks. The web, val and test are common.",
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
            updates += f", with {arm.fine_tuning.written} captions an image that another model wrote"
        what = "; then ".join(map(_told_part, arm.pretraining)) or "none"
        lines.append(f"| {arm.label} (`{arm.name}`) | {what} | {arm.updates} | {updates} |")
    where, script = (
        path.relative_to(study.root) if path.is_relative_to(study.root) else path.name
        for path in (study.contrasts, study.script)
    )
    lines += [
        "",
        f"`python {script}` runs it and writes this page; `--power` shows the power calculation. The contrasts stand "
        f"in {where}, every figure in {study.figures.relative_to(study.root)}.",
    ]
    return "\n".join(lines)


def _layers(study: Study) -> str:
    """As the families of the arms have them."""
    told = []
    for family in dict.fromkeys(arm.family for arm in study.arms):
        own = sizes(family, study.setting)
        counts = [f"{name.replace('_', ' ')} {value}" for name, value in own.items() if name.endswith("layers")]
        told.append(f"{family} with {', '.join(counts)}")
    return "; ".join(told)


def _told_part(part: Pretraining) -> str:
    """One pretraining, in words."""
    names = [name.upper() for name in part.objectives]
    if part.mix == "sample":
        told = "drawn: " + ", ".join(f"{s:g} {name}" for s, name in zip(part.shares, part.objectives, strict=True) if s)
    else:
        weights = part.weights or (1.0,) * len(names)
        weighed = [name if weight == 1 else f"{weight:g} {name}" for weight, name in zip(weights, names, strict=True)]
        told = " + ".join(weighed) if part.mix == "sum" else f"{', '.join(weighed)} in turns"
    told += "" if part.scheduled_sampling == "none" else f", two passes, {part.scheduled_sampling.upper()}"
    of = {"pairs": "", "texts": ", texts alone", "images": ", images alone", "blanked": ", texts without their images"}
    told += of[part.reads] + (", on the target's own pairs" if part.where == "target" else "")
    frozen = f", frozen: {', '.join(part.frozen).replace('_', ' ')}" if part.frozen else ""
    return f"{told}{frozen} ({part.updates})"


def _cost(arms: Sequence[Arm], found: Found) -> str:
    rows = [
        "| arm | pretraining, CPU s | fine-tuning and measuring, CPU s | budgets chosen |",
        "|---|---|---|---|",
    ]
    total, commits = 0.0, set()
    for arm in arms:
        results = list(found[arm.name].values())
        if not results:
            continue
        seconds: dict[str, list[float]] = defaultdict(list)
        for r in results:
            commits.add(r.get("commit", ""))
            total += sum(r["seconds"].values())
            seconds["pretraining"].append(r["seconds"]["pretraining"] + r["seconds"].get("writing", 0.0))
            seconds["rest"].append(r["seconds"]["fine-tuning"] + r["seconds"]["measuring"])
        means = [f"{statistics.mean(seconds[name]):.0f}" for name in ("pretraining", "rest")]
        budgets = [
            f"{task} {'/'.join(map(str, sorted({r['budgets'][task] for r in results})))}"
            for task in results[0]["budgets"]
        ]
        rows.append(f"| {arm.label} | {' | '.join(means)} | {', '.join(budgets)} |")
    runs = sum(len(rows) for rows in found.values())
    load = statistics.mean(r["load"] for rows in found.values() for r in rows.values())
    return (
        f"{runs} runs took {total / 60:.0f} CPU minutes, one thread each, beside a mean load of {load:.1f}; commit "
        f"{', '.join(sorted(filter(None, commits))) or 'unknown'}.\n\n" + "\n".join(rows)
    )


def summary(arms: Sequence[Arm], found: Found) -> str:
    return arm_table(arms, found) + "\n\n" + (_cost(arms, found) if any(found.values()) else "nothing is finished")


def _difference(mean: float, half: float, metric: str) -> str:
    digits = METRICS[metric][2]
    return f"{mean:+.{digits}f} +- {half:.{digits}f}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
