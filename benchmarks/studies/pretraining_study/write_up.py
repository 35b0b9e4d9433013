"""A study's document, made of its results and of the contrasts as they were written down before."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining_study.arms import Arm, DrawnPretraining
from pretraining_study.contrasts import CANNOT_TELL, HOLDS, OPPOSITE, Finding, Plan, compare
from pretraining_study.measure import METRICS
from pretraining_study.statistics import detectable

if TYPE_CHECKING:
    from pretraining_study.study import Study

Found = Mapping[str, Mapping[int, dict[str, Any]]]  # arm -> seed -> result
_AS_FOUND = {HOLDS: "What holds", OPPOSITE: "What is the other way round", CANNOT_TELL: "What can't be told"}


def write_up(study: Study, plan: Plan, findings: Sequence[Finding], found: Found) -> str:
    sections = [
        f"# {study.title}",
        _answer(findings),
        "## The contrasts",
        _contrasts(plan, findings, found),
        *_lists(findings),
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
        "\n\nDifferences are of the same seed's two arms. NLL is that of the held-out references given the image: less "
        "is better, so a difference below zero speaks for the first arm. `holds`: the difference has the paper's "
        "direction and p, "
        f"corrected for all {len(findings)} contrasts, is below {plan.alpha:g}. `size` compares the interval, which is "
        f"not corrected, with the smallest difference that matters.{planned}"
    )


def _lists(findings: Sequence[Finding]) -> list[str]:
    sections = []
    for verdict, title in _AS_FOUND.items():
        chosen = [f for f in findings if f.verdict == verdict]
        if chosen:
            sections += [f"## {title}", "\n".join(_told(f) for f in chosen)]
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
            digits, values = METRICS[metric][2], [r["test"][metric] for r in results]
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
            difference = compare(values, first, second, metric)
            cells.append(_difference(difference.mean, difference.half, metric))
        rows.append(f"| {first} - {second} | {' | '.join(cells)} |")
    return (
        "Looked at besides, not corrected for their number, so no verdicts. R@1 counts any image of which the caption "
        "is true.\n\n" + "\n".join(rows)
    )


def _measured(found: Found) -> list[str]:
    """The metrics of the tasks that the models can do."""
    results = [r["test"] for rows in found.values() for r in rows.values()]
    return [metric for metric in METRICS if all(metric in result for result in results)]


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
    lines = [
        f"- Pretraining: {s.web:,} scenes with one alt text each, of which {n.mismatched:.0%} describe another scene "
        f"and {n.boilerplate:.0%} stand in boilerplate; {n.hypernyms:.0%} of the nouns are hypernyms, "
        f"{n.lost_words:.0%} of the words are lost.",
        f"- Target: {s.train} images a seed with five clean captions and {s.questions} questions each; {s.val} images "
        f"to choose a budget by; {s.test} to measure on.",
        "- A seed draws the target's images, the weights, the order and the masks. The web, val and test are common.",
        f"- Regions: symbols of the objects with noise of {s.feature_noise:g}, through a fixed random projection to "
        f"{s.feature_dim} numbers. There is no detector.",
        f"- Model: {s.hidden} wide, {s.heads} heads, {s.layers} layer a module; AdamW at {s.lr:g}, batches of "
        f"{s.batch}.",
        *(f"- {note}" for note in study.notes),
        "",
        "| arm | pretraining | updates | fine-tuning |",
        "|---|---|---|---|",
    ]
    for arm in study.arms:
        p, budgets = arm.pretraining, arm.fine_tuning.budgets
        what = f"{' + '.join(p.objectives).upper()}, {p.passes}" if p else "none"
        if isinstance(p, DrawnPretraining):
            what = _drawn(dict(zip(p.objectives, p.shares, strict=True)))
            what = f"{p.texts_first} updates on texts ({_drawn(p.texts_learn)}); {what}" if p.texts_first else what
        updates = (
            f"{budgets[0]} updates" if len(budgets) == 1 else f"best on val of {', '.join(map(str, budgets))} updates"
        )
        lines.append(f"| {arm.label} (`{arm.name}`) | {what} | {p.updates if p else 0} | {updates} |")
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


def _drawn(shares: Mapping[str, float]) -> str:
    return "drawn: " + ", ".join(f"{share:g} {name}" for name, share in shares.items() if share)


def _cost(arms: Sequence[Arm], found: Found) -> str:
    rows = [
        "| arm | pretraining, CPU s | fine-tuning and measuring, CPU s | budgets chosen: captioning, VQA, retrieval |",
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
            seconds["pretraining"].append(r["seconds"]["pretraining"])
            seconds["rest"].append(r["seconds"]["fine-tuning"] + r["seconds"]["measuring"])
        means = [f"{statistics.mean(seconds[name]):.0f}" for name in ("pretraining", "rest")]
        budgets = ["/".join(map(str, sorted({r["budgets"][task] for r in results}))) for task in results[0]["budgets"]]
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
