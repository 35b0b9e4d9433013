"""A study as a command: the main function of each studies/*.py.

    python studies/NAME.py --power
    python studies/NAME.py --seeds 2 --share 0.1      a trial before the long run
    python studies/NAME.py --first-seed 101 --seeds 3 --arms ARM ARM      a pilot, of other seeds

A killed study continues where it stopped; several processes with the same arguments share the work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm
from pretraining_study.contrasts import Finding, Plan, compare, judge, read_plan
from pretraining_study.measure import METRICS
from pretraining_study.results import ROOT, Results
from pretraining_study.setting import Setting
from pretraining_study.write_up import cost_rows, differences, finding_rows, summary, write_up


@dataclass(frozen=True, kw_only=True)
class Study:
    """name: of its results and of its document. title: of the document. contrasts: the file they were written down in.
    notes: what a reader must know besides. root: of the repository."""

    name: str
    title: str
    script: Path
    arms: tuple[Arm, ...]
    contrasts: Path
    setting: Setting = field(default_factory=Setting)
    notes: tuple[str, ...] = ()
    root: Path = ROOT

    @property
    def work(self) -> Path:
        return self.root / ".work" / "studies" / self.name

    @property
    def document(self) -> Path:
        return self.root / "benchmarks" / "results" / f"study-{self.name}.md"

    @property
    def figures(self) -> Path:
        return self.root / "benchmarks" / "results" / f"study-{self.name}.json"

    @property
    def plan(self) -> Plan:
        return read_plan(self.contrasts, [arm.name for arm in self.arms])


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    plan = study.plan
    parser = argparse.ArgumentParser(description=study.title)
    parser.add_argument("--seeds", type=int, default=plan.seeds, help=f"seeds 1 to N; the plan: {plan.seeds}")
    parser.add_argument("--first-seed", type=int, default=1, help="101 and on: a pilot, which is not the study's")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in study.arms], help="only these")
    parser.add_argument("--share", type=float, default=1.0, help="of all updates, for a trial before the long run")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the work")
    parser.add_argument("--finished", action="store_true", help="run nothing: write up what is there")
    parser.add_argument("--power", action="store_true", help="run nothing: how many seeds each contrast needs")
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="run nothing: what an update of each arm costs")
    chosen = parser.parse_args(arguments)
    if chosen.cost:
        print_cost(study, chosen.cost)
        return
    if chosen.power:
        print_power(plan)
        return
    arms = [arm.scaled(chosen.share) for arm in study.arms if not chosen.arms or arm.name in chosen.arms]
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    results = Results(study.work, study.setting)
    if not chosen.finished:
        if chosen.workers > 1:
            _share(study.script, arguments if arguments is not None else sys.argv[1:], chosen.workers)
        else:
            work(arms, seeds, study.setting, results)
    found = {arm.name: {s: r for s in seeds if (r := results.read(arm, s)) is not None} for arm in arms}
    missing = sum(len(seeds) - len(found[arm.name]) for arm in arms)
    if missing and not chosen.finished:
        print(f"{missing} of {len(seeds) * len(arms)} are in another process's hands; the last one to end writes up")
        return
    whole = not chosen.arms and chosen.share == 1 and chosen.first_seed == 1
    if not whole or min(map(len, found.values())) < 2:
        print(summary(arms, found))
        print_deviations(plan, found)
        print("no document: that takes all arms, two seeds at least, seed 1 on, and all updates")
        return
    values = {arm: {seed: result["test"] for seed, result in rows.items()} for arm, rows in found.items()}
    findings = judge(plan, values)
    text_alone = measure_text_alone(study, next(iter(found.values())))
    text = write_up(study, plan, findings, found, text_alone)
    study.document.parent.mkdir(parents=True, exist_ok=True)
    study.document.write_text(text, encoding="utf-8")
    _keep(study, plan, findings, found, text_alone)
    print(text)


def work(arms: Sequence[Arm], seeds: Sequence[int], setting: Setting, results: Results) -> None:
    """Run what is missing, seed by seed, and print the time left."""
    from pretraining_study.data import Data
    from pretraining_study.run import run_arm

    parts = [(arm, seed) for seed in seeds for arm in arms]
    if all(results.read(arm, seed) is not None for arm, seed in parts):
        return
    print("making the data", flush=True)
    data = Data(setting)
    taken: dict[str, list[float]] = {}  # arm -> seconds of each run
    for arm, seed in parts:
        with results.claimed(arm, seed) as mine:
            if not mine or results.read(arm, seed) is not None:
                continue
            start = time.perf_counter()
            result = run_arm(arm, seed, data)
            results.write(arm, seed, result)
            taken.setdefault(arm.name, []).append(time.perf_counter() - start)
        left = [a.name for a, s in parts if results.read(a, s) is None]
        print(
            f"[{len(parts) - len(left)}/{len(parts)}] {arm.name}, seed {seed}: {_first(result['test'])}, "
            f"{sum(result['seconds'].values()):.0f} CPU s; about {time_left(taken, left) / 60:.0f} minutes left",
            flush=True,
        )


def measure_text_alone(study: Study, seeds: Iterable[int]) -> dict[str, list[float]]:
    """Return metric -> what texts give without images (`measure.text_alone`), a value for each seed."""
    if not any("vqa" in arm.tasks for arm in study.arms):
        return {}
    from pretraining_study.data import Data
    from pretraining_study.measure import text_alone

    data = Data(study.setting)
    rows = [text_alone(data, seed) for seed in seeds]
    return {metric: [row[metric] for row in rows] for metric in rows[0]}


def _first(test: Mapping[str, float]) -> str:
    """Of the first task that the arm was measured on."""
    metric = next(metric for metric in METRICS if metric in test)
    return f"{METRICS[metric][0]} {test[metric]:.4f}"


def time_left(taken: dict[str, list[float]], left: Sequence[str]) -> float:
    """Seconds of one process: each arm as it took so far, one not seen yet as the mean of the others."""
    known = {name: sum(values) / len(values) for name, values in taken.items()}
    mean = sum(known.values()) / len(known)
    return sum(known.get(name, mean) for name in left)


def print_cost(study: Study, rounds: int) -> None:
    from pretraining_study.cost import update_costs
    from pretraining_study.data import Data

    seconds = update_costs(study.arms, Data(study.setting), rounds)
    first = next(iter(seconds))
    for name, value in seconds.items():
        print(f"{name}: {1000 * value:.1f} CPU ms an update, {value / seconds[first]:.2f} of {first}'s")


def print_power(plan: Plan) -> None:
    print(f"{plan.seeds} seeds, Holm's correction over {len(plan.contrasts)} contrast(s) at {plan.alpha:g}")
    for contrast, needed, reached in plan.power_table():
        print(
            f"{contrast.first} - {contrast.second}, {contrast.metric}: {contrast.smallest:g} at a deviation of "
            f"{contrast.deviation:g} needs {needed} seeds for 80%; power at {plan.seeds}: {100 * reached:.0f}%"
        )


def print_deviations(plan: Plan, found: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
    """Of a pilot: what `deviation` in the file of contrasts should say."""
    values = {arm: {seed: result["test"] for seed, result in rows.items()} for arm, rows in found.items()}
    for c in plan.contrasts:
        if len(values.get(c.first, {}).keys() & values.get(c.second, {}).keys()) > 1:
            difference = compare(values, c.first, c.second, c.metric)
            print(
                f"{c.first} - {c.second}, {c.metric}: mean {difference.mean:+.4f}, "
                f"deviation {difference.deviation:.4f} over {difference.n} seeds"
            )


def _share(script: Path, arguments: Sequence[str], workers: int) -> None:
    words = list(arguments)
    at = words.index("--workers")
    words[at + 1] = "1"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, str(script), *words], env=environment) for _ in range(workers)]
    for process in started:
        if process.wait() != 0:
            sys.exit(f"a process of the study failed ({process.returncode}); see its output")


def _keep(
    study: Study,
    plan: Plan,
    findings: Sequence[Finding],
    found: Mapping[str, Mapping[int, dict[str, Any]]],
    text_alone: Mapping[str, Sequence[float]],
) -> None:
    """Write all results, and the findings of the page, next to those of the other benchmarks."""
    whole = {
        "setting": asdict(study.setting),
        "arms": [asdict(arm) for arm in study.arms],
        "contrasts": [asdict(contrast) for contrast in plan.contrasts],
        "findings": finding_rows(plan, findings),
        "differences": differences(plan, found),
        "costs": cost_rows(study.arms, found),
        "text_alone": text_alone,
        "results": [result for rows in found.values() for result in rows.values()],
    }
    study.figures.parent.mkdir(parents=True, exist_ok=True)
    study.figures.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
