"""Write the leaderboard's page: a table for each budget, paired differences, costs, and the searches."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pretraining_study.board import (
    BUDGETS,
    PRIMARY,
    Board,
    BoardContrast,
    best,
    measure_text_alone,
    trials_of,
)
from pretraining_study.measure import METRICS
from pretraining_study.statistics import Paired, detectable, paired
from vlp_models.metrics.gain import holm

Found = Mapping[str, Mapping[str, Mapping[int, dict[str, Any]]]]  # budget -> design -> seed -> result
Verdict = Literal["better", "worse", "tied", "inconclusive", "not run"]
TITLES = {"pairs": "Equal pairs", "flops": "Equal FLOPs", "seconds": "Equal seconds"}
NOT_RUN: Literal["not run"] = "not run"


@dataclass(frozen=True, kw_only=True)
class BoardFinding:
    """found, p: None with fewer than two common seeds. p is corrected over all contrasts of all budgets."""

    budget: str
    contrast: BoardContrast
    found: Paired | None
    p: float | None
    verdict: Verdict


def judge_board(board: Board, found: Found) -> list[BoardFinding]:
    """A finding for each budget and contrast. One that was not run counts in the correction, with p = 1."""
    rows = []
    for budget in BUDGETS:
        for c in board.plan.contrasts:
            first, second = found[budget][c.first], found[budget][c.second]
            seeds = sorted(first.keys() & second.keys())
            values = [[side[seed]["test"][c.metric] for seed in seeds] for side in (first, second)]
            rows.append((budget, c, paired(*values) if len(seeds) > 1 else None))
    adjusted = holm([difference.p if difference else 1.0 for _, _, difference in rows])
    return [
        BoardFinding(
            budget=budget,
            contrast=c,
            found=difference,
            p=p if difference else None,
            verdict=verdict_of(difference, p, c.metric, board.plan.smallest[c.metric], board.plan.alpha),
        )
        for (budget, c, difference), p in zip(rows, adjusted, strict=True)
    ]


def verdict_of(found: Paired | None, p: float, metric: str, smallest: float, alpha: float) -> Verdict:
    if found is None:
        return NOT_RUN
    if -smallest < found.low and found.high < smallest:
        return "tied"
    if p >= alpha:
        return "inconclusive"
    return "better" if (found.mean < 0) == METRICS[metric][1] else "worse"


def write_board(board: Board, costs: Mapping[str, Any], found: Found, *, trials: int, keep: bool) -> str:
    """Return the page. keep: write it and all results to benchmarks/results, too."""
    findings = judge_board(board, found)
    sections = [f"# {board.title}", _counts(board, findings, found, trials)]
    for budget in BUDGETS:
        own = [f for f in findings if f.budget == budget]
        sections += [f"## {TITLES[budget]}", _budget(board, budget, costs), _scores(board, found[budget])]
        sections += ["Differences, the first design less the second:", _differences(board, own), _aloud(own)]
    sections += [
        "## Costs",
        _costs(board, costs),
        "## Search",
        _search(board, trials),
        "## The set-up",
        _setting(board),
    ]
    text = "\n\n".join(sections) + "\n"
    if keep:
        board.page.parent.mkdir(parents=True, exist_ok=True)
        board.page.write_text(text, encoding="utf-8")
        board.figures.write_text(json.dumps(_figures(board, costs, found, trials), indent=1) + "\n", encoding="utf-8")
    return text


def _figures(board: Board, costs: Mapping[str, Any], found: Found, trials: int) -> dict[str, Any]:
    searches = {design.name: trials_of(board, design, trials) for design in board.designs}
    return {
        **board.made_of,
        "costs": costs,
        "text_alone": measure_text_alone(board, None, ()),
        "trials": searches,
        "chosen": {name: best(done) for name, done in searches.items() if len(done) == trials},
        "results": {
            budget: [result for rows in of_budget.values() for result in rows.values()]
            for budget, of_budget in found.items()
        },
        "contrasts": [_contrast(finding) for finding in judge_board(board, found)],
    }


def _contrast(f: BoardFinding) -> dict[str, Any]:
    names = {"budget": f.budget, "metric": f.contrast.metric, "contrast": f"{f.contrast.first} - {f.contrast.second}"}
    difference = {"mean": f.found.mean, "half": f.found.half} if f.found else {}
    return {**names, **difference, "p_holm": f.p, "verdict": f.verdict}


def _counts(board: Board, findings: Sequence[BoardFinding], found: Found, trials: int) -> str:
    plan = board.plan
    seeds = {budget: [len(rows) for rows in found[budget].values()] for budget in BUDGETS}
    ran = "; ".join(
        f"{TITLES[budget].replace('E', 'e', 1)}: "
        + (
            NOT_RUN
            if not max(counts)
            else f"{min(counts)} seeds"
            if min(counts) == max(counts)
            else f"{min(counts)} to {max(counts)} seeds"
        )
        for budget, counts in seeds.items()
    )
    number = {v: sum(f.verdict == v for f in findings) for v in ("better", "worse", "tied", "inconclusive", NOT_RUN)}
    return (
        f"{len(board.designs)} designs, {trials} search trials each, then {ran}. The plan has {plan.trials} trials and "
        f"{plan.seeds} seeds. {len(plan.contrasts)} contrasts at {len(BUDGETS)} budgets were written down before the "
        f"runs: {number['better'] + number['worse']} different, {number['tied']} tied, {number['inconclusive']} "
        f"inconclusive, {number[NOT_RUN]} not run."
    )


def _budget(board: Board, budget: str, costs: Mapping[str, Any]) -> str:
    reference = next(d.label for d in board.designs if d.name == board.plan.reference)
    if budget == "pairs":
        return f"Each design reads {board.plan.pairs:,} pairs in pretraining."
    amount = costs["designs"][board.plan.reference][budget] * board.plan.pairs
    text = f"{amount / 1e9:.1f} GFLOP" if budget == "flops" else f"{amount:.0f} CPU seconds"
    return (
        f"Each design has {text} of pretraining: what {board.plan.pairs:,} pairs take with {reference}, whose runs are "
        "those of the first table. Settings are those found at equal pairs."
    )


def _metrics(found: Mapping[str, Mapping[int, dict[str, Any]]]) -> list[str]:
    tests = [result["test"] for rows in found.values() for result in rows.values()]
    return [metric for metric in METRICS if any(metric in test for test in tests)]


def _scores(board: Board, found: Mapping[str, Mapping[int, dict[str, Any]]]) -> str:
    """Means over seeds, with standard deviations."""
    metrics = _metrics(found) or list(PRIMARY.values())
    rows = [
        "| design | seeds | pairs | updates | pretraining, CPU s | "
        + " | ".join(METRICS[m][0] for m in metrics)
        + " |",
        "|---" * (5 + len(metrics)) + "|",
    ]
    for design in board.designs:
        results = list(found[design.name].values())
        if not results:
            rows.append(f"| {design.label} | {NOT_RUN} |" + " |" * (3 + len(metrics)))
            continue
        seconds = statistics.mean(r["seconds"]["pretraining"] for r in results)
        cells = [f"{results[0]['pairs']:,}", f"{results[0]['updates']:,}", f"{seconds:.1f}"]
        for metric in metrics:
            digits, values = METRICS[metric][2], [r["test"][metric] for r in results if metric in r["test"]]
            spread = f" (sd {statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}" if values else "")
        rows.append(f"| {design.label} | {len(results)} | {' | '.join(cells)} |")
    if alone := measure_text_alone(board, None, ()):
        by_metric = {m: [row[m] for row in alone if m in row] for m in metrics}
        cells = [f"{statistics.mean(v):.{METRICS[m][2]}f}" if v else "" for m, v in by_metric.items()]
        rows.append(f"| texts alone, or chance | {len(alone)} | | | | {' | '.join(cells)} |")
    return "\n".join(rows)


def _differences(board: Board, findings: Sequence[BoardFinding]) -> str:
    level = board.plan.alpha / (len(board.plan.contrasts) * len(BUDGETS))
    rows = [
        "| first - second | metric | difference, 95% interval | smallest that matters | found with 80% power | p, Holm "
        "| verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in findings:
        c, digits = f.contrast, METRICS[f.contrast.metric][2]
        cells = ["", f"{board.plan.smallest[c.metric]:g}", "", ""]
        if f.found and f.p is not None:
            least = detectable(f.found.n, deviation=f.found.deviation, alpha=level) if f.found.deviation else 0.0
            cells = [
                f"{f.found.mean:+.{digits}f} +- {f.found.half:.{digits}f}",
                cells[1],
                f"{least:.{digits}f}",
                "< 0.001" if f.p < 0.001 else f"{f.p:.3f}",
            ]
        rows.append(f"| {c.first} - {c.second} | {METRICS[c.metric][0]} | {' | '.join(cells)} | {_named(f)} |")
    return "\n".join(rows)


def _named(f: BoardFinding) -> str:
    if f.verdict in ("better", "worse"):
        winner = f.contrast.first if f.verdict == "better" else f.contrast.second
        return f"**{winner} is better**"
    return f"**{f.verdict}**"


def _aloud(findings: Sequence[BoardFinding]) -> str:
    """One line for each kind of verdict, so that a tie is as visible as a winner."""
    lines = []
    for title, verdicts in {
        "Different": ("better", "worse"),
        "Tied": ("tied",),
        "Inconclusive": ("inconclusive",),
        "Not run": (NOT_RUN,),
    }.items():
        own = [f for f in findings if f.verdict in verdicts]
        texts = [f"{f.contrast.first} and {f.contrast.second} in {METRICS[f.contrast.metric][0]}" for f in own]
        lines.append(f"- {title}: {'; '.join(texts) or 'no contrast'}.")
    return "\n".join(lines)


def _costs(board: Board, costs: Mapping[str, Any]) -> str:
    rows = ["| design | parameters | MFLOP a pair | CPU ms a pair | memory, MB |", "|---|---|---|---|---|"]
    for design in board.designs:
        own = costs["designs"][design.name]
        rows.append(
            f"| {design.label} | {own['parameters']:,} | {own['flops'] / 1e6:.0f} | {1000 * own['seconds']:.2f} | "
            f"{own['memory']:.0f} |"
        )
    return (
        "Forward, backward and optimizer of pretraining on one thread. FLOPs are those of matrix products and "
        "convolutions. Memory is the growth of a process from before the model to the peak of pretraining. Fine-tuning "
        f"is {board.plan.tuning_updates} updates of {board.setting.batch} for every design and task, outside the "
        f"budgets. Measured once, designs in turns, at a load of {costs['load']:.1f}; commit {costs['commit']}.\n\n"
        + "\n".join(rows)
    )


def _search(board: Board, trials: int) -> str:
    names = list(board.plan.space)
    rows = [
        f"| design | trials | score of the defaults | best score | {' | '.join(n.replace('_', ' ') for n in names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for design in board.designs:
        done = trials_of(board, design, trials)
        scores = [f"{t['score']:.2f}" if t["score"] is not None else "diverged" for t in done]
        if len(done) < trials:
            rows.append(f"| {design.label} | {len(done)} of {trials} |" + " |" * (2 + len(names)))
            continue
        chosen = best(done)
        values = [f"{chosen['settings'][name]:.3g}" for name in names]
        rows.append(f"| {design.label} | {trials} | {scores[0]} | {chosen['score']:.2f} | {' | '.join(values)} |")
    units = ", ".join(f"{METRICS[m][0]} {value:g}" for m, value in board.plan.smallest.items())
    return (
        "Every design has the same number of trials over the same space (Optuna: the defaults, then random draws that "
        f"are equal for all designs, then TPE), each trained at equal pairs with seed {board.plan.search_seed} and "
        "judged on val. The score is the mean over the design's tasks of its primary metric, in units of the smallest "
        f"difference that matters ({units}); higher is better. Scores of designs with other tasks are not "
        "comparable.\n\n" + "\n".join(rows)
    )


def _setting(board: Board) -> str:
    s = board.setting
    lines = [
        *board.notes,
        f"Data: {s.web:,} images for pretraining; per seed {s.train} images for fine-tuning; {s.val} for the "
        f"search; {s.test} for testing. A seed draws the images for fine-tuning, the weights, the order and the masks.",
        f"Models are {s.hidden} wide; AdamW at {s.lr:g}, batches of {s.batch}; captions are greedy.",
        "`tied`: the 95% interval, which is not corrected, is within the smallest difference that matters. Otherwise "
        f"`better` if p, corrected for all {len(board.plan.contrasts) * len(BUDGETS)} contrasts, is below "
        f"{board.plan.alpha:g}, else `inconclusive`. NLL: lower is better.",
        "Texts alone: the majority answer to the same question, and naive Bayes on the hypothesis' words, both from "
        "the seed's training images. NLVR2, VCR and R@1: chance.",
        f"`python {board.script}` runs it and writes this page.",
    ]
    return "\n".join(f"- {line}" for line in lines)
