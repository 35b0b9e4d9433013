"""Does pretraining help on photographs, and with how many of them?

    python studies/photographs.py --root FLICKR8K
    python studies/photographs.py --root FLICKR8K --photos 300 --share 0.02 --seeds 2     a rehearsal
    python studies/photographs.py --root FLICKR8K --finished       run nothing: write the page of the finished runs
    python studies/photographs.py --root FLICKR8K --recorded       begin with the runs that benchmarks/results has

Each design is pretrained on all training captions of Flickr8k, or not at all, and fine-tuned on a share of the training
photos: captioning, and retrieval if the model embeds images and texts. The contrasts are in photographs.toml. Regions
are the cells of EfficientNet-lite0 (requirements-photographs.lock), extracted once. A killed run continues where it
stopped. Writes study-photographs.md, study-photographs.json and study-photographs.svg, the curves, to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from leaderboard import DESIGNS
from pretraining_study import adapter, measure
from pretraining_study.arms import Arm, FineTuning
from pretraining_study.board_page import verdict_of
from pretraining_study.learn import Learner
from pretraining_study.measure import METRICS
from pretraining_study.photos import Photos
from pretraining_study.results import ROOT, Results, read_recorded
from pretraining_study.run import parameters, pretrained
from pretraining_study.setting import Setting
from pretraining_study.statistics import Paired, paired

from vlp_models.metrics.gain import holm

STAGES = {design.name: design for design in DESIGNS if design.name in ("tden", "unified-vlp")}
SETTING = Setting(hidden=128, batch=64, lr=1e-3, val=400, test=1000)
NAME, WITHOUT = "photographs", "-none"  # of the results; of an arm without pretraining
Found = Mapping[str, Mapping[int, dict[str, Any]]]  # arm -> seed -> result


@dataclass(frozen=True, kw_only=True)
class Contrast:
    design: str
    metric: str
    smallest: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The keys of photographs.toml."""

    alpha: float
    seeds: int
    shares: tuple[float, ...]
    epochs: float
    tuning_updates: tuple[int, ...]
    cells: int
    contrasts: tuple[Contrast, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Pretrained less not pretrained, over the seeds that have both; None with fewer than two."""

    contrast: Contrast
    share: float
    sides: tuple[list[float], list[float]]  # pretrained, not pretrained
    found: Paired | None
    p: float
    verdict: str


def read_plan(path: Path) -> Plan:
    """
    Raises:
        ValueError: an unknown design or metric.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    contrasts = tuple(Contrast(**row) for row in raw.pop("contrast"))
    for c in contrasts:
        if c.design not in STAGES or c.metric not in ("nll", "r1"):
            raise ValueError(f"{path}: no contrast of {c.design} by {c.metric}")
    raw |= {name: tuple(raw[name]) for name in ("shares", "tuning_updates")}
    return Plan(**raw, contrasts=contrasts)


def arms_of(plan: Plan, captions: int, batch: int) -> list[Arm]:
    """With and without pretraining, design by design."""
    arms = []
    for name in dict.fromkeys(c.design for c in plan.contrasts):
        design = STAGES[name]
        updates = max(1, round(plan.epochs * captions / batch))
        parts = tuple(replace(part, updates=max(1, round(updates * share))) for share, part in design.stages)
        plain = Arm(
            name=name,
            label=design.label,
            family=design.family,
            pretraining=parts,
            fine_tuning=FineTuning(budgets=plan.tuning_updates),
        )
        arms += [plain, replace(plain, name=name + WITHOUT, pretraining=())]
    return arms


def run(arm: Arm, seed: int, photos: Photos, plan: Plan) -> dict[str, Any]:
    """Return `test`: share -> metric -> value, and `chosen`: share -> task -> the updates that were best on val."""
    torch.set_num_threads(1)
    start = time.process_time()
    model = pretrained(arm, seed, photos, photos.train(seed))
    test: dict[str, dict[str, float]] = {}
    chosen: dict[str, dict[str, int]] = {}
    for share in plan.shares:
        split = photos.drawn(seed, max(2, round(share * len(photos.photos["train"]))))
        values: dict[str, float] = {}
        for task in tasks_of(model, photos):
            learners = {}
            for updates in arm.fine_tuning.budgets:
                learners[updates] = Learner(copy.deepcopy(model), photos, split, seed=seed, lr=photos.setting.lr)
                learners[updates].learn(task, updates)
            best = max(learners, key=lambda updates: _score(task, learners[updates].model, photos))
            values |= _measured(task, learners[best].model, photos)
            chosen.setdefault(f"{share:g}", {})[task] = best
        test[f"{share:g}"] = values
    return {
        "arm": arm.name,
        "seed": seed,
        "test": test,
        "chosen": chosen,
        "updates": arm.updates,
        "parameters": parameters(model),
        "seconds": round(time.process_time() - start, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def tasks_of(model: torch.nn.Module, photos: Photos) -> list[str]:
    """Retrieval only by embeddings: 1,000 photos are too many to fuse with every caption."""
    found = filter(partial(adapter.can, model), photos.tasks)
    return [task for task in found if task != "retrieval" or adapter.embeds(model)]


def _score(task: str, model: torch.nn.Module, photos: Photos) -> float:
    return -measure.nll(model, photos.val) if task == "captioning" else measure.retrieval(model, photos.val)["r1"]


def _measured(task: str, model: torch.nn.Module, photos: Photos) -> dict[str, float]:
    if task == "retrieval":
        return {"r1": measure.retrieval(model, photos.test)["r1"]}
    return {"nll": measure.nll(model, photos.test), **measure.captions(model, photos.test, photos)}


def judge(plan: Plan, found: Found) -> list[Row]:
    """A row for each contrast and share. Holm's correction is over all of them; one that was not run has p = 1."""
    rows = []
    for c in plan.contrasts:
        for share in plan.shares:
            sides = _sides(found, c.design, f"{share:g}", c.metric)
            rows.append((c, share, sides, paired(*sides) if len(sides[0]) > 1 else None))
    adjusted = holm([difference.p if difference else 1.0 for *_, difference in rows])
    return [
        Row(
            contrast=c,
            share=share,
            sides=sides,
            found=difference,
            p=p,
            verdict=verdict_of(difference, p, c.metric, c.smallest, plan.alpha),
        )
        for (c, share, sides, difference), p in zip(rows, adjusted, strict=True)
    ]


def _sides(found: Found, design: str, share: str, metric: str) -> tuple[list[float], list[float]]:
    first, second = found[design], found[design + WITHOUT]
    seeds = sorted(first.keys() & second.keys())
    return [first[s]["test"][share][metric] for s in seeds], [second[s]["test"][share][metric] for s in seeds]


def write_page(plan: Plan, found: Found, photos: int) -> str:
    rows = judge(plan, found)
    parts = [
        "# Does pretraining help on photographs?",
        f"Flickr8k, {photos:,} training photos; {_seeds(plan, found)} planned seeds. Pretrained on all training "
        f"captions ({plan.epochs:g} epochs) or not, then fine-tuned on a share of the photos, for the number of "
        f"updates ({', '.join(map(str, plan.tuning_updates))}) that is best on val. Official dev is the test set.",
    ]
    for c in plan.contrasts:
        parts += [
            f"## {STAGES[c.design].label}: {METRICS[c.metric][0]}",
            _curve(c, [r for r in rows if r.contrast == c]),
        ]
        if c.metric == "nll":
            parts += ["CIDEr, not corrected:", _cider(plan, found, c.design)]
    parts.append(
        f"Differences are pretrained less not pretrained, seed by seed, with 95% intervals. p is corrected for all "
        f"{len(rows)} contrasts. `tied`: the interval is within the smallest difference that matters. `better`, "
        "`worse`: of the pretrained model. NLL: lower is better."
    )
    return "\n\n".join(parts) + "\n"


def _seeds(plan: Plan, found: Found) -> str:
    """Return "2 of 3", by design if they have not equally many."""
    counts = {c.design: min(len(found[c.design]), len(found[c.design + WITHOUT])) for c in plan.contrasts}
    if len(set(counts.values())) == 1:
        return f"{min(counts.values())} of {plan.seeds}"
    return ", ".join(f"{STAGES[name].label} {count}" for name, count in counts.items()) + f" of {plan.seeds}"


def _curve(c: Contrast, rows: Sequence[Row]) -> str:
    digits = METRICS[c.metric][2]
    lines = [
        "| share of the photos | pretrained | not pretrained | difference, 95% interval | p, Holm | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = ["", "", "", ""]
        if row.found:
            cells = [
                *(f"{statistics.mean(side):.{digits}f}" for side in row.sides),
                f"{row.found.mean:+.{digits}f} +- {row.found.half:.{digits}f}",
                "< 0.001" if row.p < 0.001 else f"{row.p:.3f}",
            ]
        lines.append(f"| {row.share:.0%} | {' | '.join(cells)} | **{row.verdict}** |")
    return "\n".join(lines) + f"\n\nThe smallest difference that matters: {c.smallest:g}."


def _cider(plan: Plan, found: Found, design: str) -> str:
    lines = ["| share of the photos | pretrained | not pretrained | difference, 95% interval |", "|---|---|---|---|"]
    for share in plan.shares:
        sides = _sides(found, design, f"{share:g}", "cider")
        if len(sides[0]) < 2:
            lines.append(f"| {share:.0%} | not run | not run | |")
            continue
        d = paired(*sides)
        means = " | ".join(f"{statistics.mean(side):.1f}" for side in sides)
        lines.append(f"| {share:.0%} | {means} | {d.mean:+.1f} +- {d.half:.1f} |")
    return "\n".join(lines)


def finding_rows(plan: Plan, found: Found) -> list[dict[str, Any]]:
    """Return a row for each contrast and share, and for CIDEr, which is not corrected and has neither p nor verdict.

    `name` is "DESIGN METRIC SHARE", `pretrained` and `not` are the values of the seeds.
    """
    made = []
    for row in judge(plan, found):
        made.append(_finding(row.contrast.design, row.contrast.metric, row.share, row.sides))
        made[-1] |= {"p": row.p, "verdict": row.verdict}
    for design in dict.fromkeys(c.design for c in plan.contrasts if c.metric == "nll"):
        made += [_finding(design, "cider", s, _sides(found, design, f"{s:g}", "cider")) for s in plan.shares]
    return made


def _finding(design: str, metric: str, share: float, sides: tuple[list[float], list[float]]) -> dict[str, Any]:
    row = {"name": f"{design} {metric} {share:g}", "pretrained": sides[0], "not": sides[1]}
    return row | (asdict(paired(*sides)) if len(sides[0]) > 1 else {})


def draw(plan: Plan, found: Found, path: Path) -> None:
    """Write the curves as an SVG: a panel for each contrast with two seeds or more, means with 95% intervals over seeds
    (Student's t)."""
    import matplotlib
    from matplotlib.figure import Figure
    from scipy.stats import t

    drawn = [c for c in plan.contrasts if len(_sides(found, c.design, f"{plan.shares[0]:g}", c.metric)[0]) > 1]
    if not drawn:
        return
    figure = Figure(figsize=(3.4 * len(drawn), 3), layout="constrained")
    axes = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axis, c in zip(axes, drawn, strict=True):
        sides = [_sides(found, c.design, f"{share:g}", c.metric) for share in plan.shares]
        for side, label in enumerate(("pretrained", "not pretrained")):
            values = [pair[side] for pair in sides]
            half = [t.ppf(0.975, len(v) - 1) * statistics.stdev(v) / len(v) ** 0.5 for v in values]
            axis.errorbar(plan.shares, [statistics.mean(v) for v in values], half, marker="o", capsize=3, label=label)
        axis.set_xscale("log")
        axis.set_xticks(plan.shares, [f"{share:.0%}" for share in plan.shares])
        axis.minorticks_off()
        axis.set_xlabel("photos for fine-tuning")
        axis.set_title(f"{STAGES[c.design].label}: {METRICS[c.metric][0]}", fontsize=10)
    axes[0].legend()
    with matplotlib.rc_context({"svg.hashsalt": NAME}):
        figure.savefig(path, metadata={"Date": None})


def load_recorded(file: Path, results: Results, arms: Sequence[Arm], plan: Plan) -> None:
    """Take over the runs of an earlier sitting, or of another machine.

    Raises:
        ValueError: there are none, or they were made with another setting or plan.
    """
    kept = read_recorded(file, {"setting": asdict(results.setting), "plan": asdict(plan)})
    for arm in arms:
        for seed, result in kept["results"][arm.name].items():
            results.add_missing(arm, int(seed), result)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT, setting: Setting = SETTING) -> None:
    plan = read_plan(Path(__file__).resolve().with_suffix(".toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Flickr8k: captions.txt, Images/, the official lists")
    parser.add_argument("--seeds", type=int, default=plan.seeds, help=f"seeds 1 to N; the plan: {plan.seeds}")
    parser.add_argument("--photos", type=int, help="only so many of each split, for a rehearsal")
    parser.add_argument("--share", type=float, default=1.0, help="of all updates, for a rehearsal")
    parser.add_argument("--finished", action="store_true", help="run nothing: write the page of the finished runs")
    parser.add_argument("--recorded", action="store_true", help="begin with the runs that benchmarks/results has")
    chosen = parser.parse_args(arguments)
    if chosen.share != 1:
        updates = tuple(dict.fromkeys(max(1, round(chosen.share * n)) for n in plan.tuning_updates))
        plan = replace(plan, epochs=plan.epochs * chosen.share, tuning_updates=updates)
    work = root / ".work" / "studies" / NAME
    photos = Photos.read(chosen.root, setting, cells=plan.cells, work=work, limit=chosen.photos)
    count = len(photos.photos["train"])
    photos.setting = replace(photos.setting, web=count)  # so that results of other photos are not mixed up
    results = Results(work, photos.setting)
    arms = arms_of(plan, sum(len(photo.captions) for photo in photos.photos["train"]), setting.batch)
    page = root / "benchmarks" / "results" / f"study-{NAME}.md"
    if chosen.recorded:
        try:
            load_recorded(page.with_suffix(".json"), results, arms, plan)
        except ValueError as error:
            parser.error(str(error))
    parts = [(arm, seed) for seed in range(1, chosen.seeds + 1) for arm in arms]
    for arm, seed in () if chosen.finished else parts:
        with results.claimed(arm, seed) as mine:
            if not mine or results.read(arm, seed) is not None:
                continue
            result = run(arm, seed, photos, plan)
            results.write(arm, seed, result)
        print(f"{arm.name}, seed {seed}: {json.dumps(result['test'])}; {result['seconds']:.0f} CPU s", flush=True)
    found: dict[str, dict[int, dict[str, Any]]] = {arm.name: {} for arm in arms}
    for arm, seed in parts:
        if (made := results.read(arm, seed)) is not None:
            found[arm.name][seed] = made
    text = write_page(plan, found, count)
    print(text)
    if chosen.share == 1 and chosen.photos is None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        kept = {
            "setting": asdict(photos.setting),
            "plan": asdict(plan),
            "findings": finding_rows(plan, found),
            "results": found,
        }
        draw(plan, found, page.with_suffix(".svg"))
        page.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
