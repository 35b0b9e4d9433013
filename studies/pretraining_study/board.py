"""A leaderboard: designs that were tuned by one search and pretrained with equal budgets, compared seed by seed.

A design is a model family and its way to pretrain. Each design gets the same number of search trials, judged on val
(`search`). The settings that did best are then trained with each seed at each budget: the same number of pairs, of
FLOPs, or of CPU seconds in pretraining. `measure_costs` measures FLOPs and seconds once, before everything else.

All results are files (results.py). A killed run continues where it stopped, and several processes share the work.
"""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import os
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.judging import ROWS
from pretraining_study.measure import METRICS
from pretraining_study.results import ROOT, Results, commit, read_recorded, write_whole
from pretraining_study.setting import Setting

BUDGETS = ("pairs", "flops", "seconds")
PRIMARY = {"captioning": "nll", "vqa": "answer_nll", "retrieval": "r1"}  # of the tasks that the search is judged by
STARTUP_TRIALS = 4  # the defaults, then random draws that are equal for all designs; the later trials are TPE's
ROUNDS = 48  # updates of each stage whose cost is measured; a multiple of the objectives that take turns
Settings = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Design:
    """stages: (share of the pairs, what is pretrained on them), one after the other; their `updates` are not used."""

    name: str
    label: str
    family: str
    stages: tuple[tuple[float, Pretraining], ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Of a setting that the search tunes. step: 0 draws from all values, on a logarithmic scale."""

    low: float
    high: float
    default: float
    step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BoardContrast:
    metric: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class BoardPlan:
    """What was written down before the runs.

    trials          of each design's search; `space`: the settings it tunes
    search_seed     of the trials; no seed of the comparison
    pairs           of pretraining, in the first budget; `reference`: the design whose FLOPs and seconds for them are
                    the other two
    smallest        metric -> the smallest difference that matters
    """

    alpha: float
    seeds: int
    trials: int
    search_seed: int
    pairs: int
    tuning_updates: int
    reference: str
    smallest: Mapping[str, float]
    space: Mapping[str, Range]
    contrasts: tuple[BoardContrast, ...]

    def scaled(self, share: float) -> BoardPlan:
        pairs, updates = round(self.pairs * share), round(self.tuning_updates * share)
        return replace(self, pairs=max(1, pairs), tuning_updates=max(1, updates))


def read_board_plan(path: Path, designs: Sequence[str]) -> BoardPlan:
    """
    Raises:
        ValueError: an unknown design or metric, or an invalid value.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    contrasts = tuple(BoardContrast(**row) for row in raw.pop("contrast"))
    space = {name: Range(**row) for name, row in raw.pop("space").items()}
    plan = BoardPlan(**raw, space=space, contrasts=contrasts)
    for c in contrasts:
        if unknown := {c.first, c.second, plan.reference} - set(designs):
            raise ValueError(f"{path}: no design {', '.join(sorted(unknown))}; there are {', '.join(designs)}")
        if c.metric not in plan.smallest or c.metric not in METRICS:
            raise ValueError(f"{path}: no smallest difference of {c.metric}")
    if not all(one.low <= one.default <= one.high for one in space.values()):
        raise ValueError(f"{path}: a default is outside its range")
    if plan.search_seed <= plan.seeds:
        raise ValueError(f"{path}: the search's seed is also the comparison's")
    return plan


@dataclass(frozen=True, kw_only=True)
class Board:
    """name: of its results and pages."""

    name: str
    title: str
    designs: tuple[Design, ...]
    plan: BoardPlan
    setting: Setting
    script: str
    notes: tuple[str, ...] = ()
    root: Path = field(default=ROOT)

    @property
    def results(self) -> Results:
        return Results(self.root / ".work" / "studies" / self.name, self.setting)

    @property
    def costs(self) -> Path:
        return self.results.directory / f"costs-{self.setting.fingerprint(*self.designs)}.json"

    @property
    def text_alone(self) -> Path:
        return self.results.directory / f"text-alone-{self.setting.fingerprint()}.json"

    @property
    def made_of(self) -> dict[str, Any]:
        """Return what decides the results."""
        designs = [asdict(design) for design in self.designs]
        return {"setting": asdict(self.setting), "plan": asdict(self.plan), "designs": designs}

    @property
    def page(self) -> Path:
        return self.root / "benchmarks" / "results" / f"study-{self.name}.md"

    @property
    def figures(self) -> Path:
        return self.page.with_suffix(".json")

    def scaled(self, share: float) -> Board:
        """A rehearsal: less of the web, shorter trainings."""
        if share == 1:
            return self
        s = self.setting
        web, warmup = max(4 * s.batch, round(s.web * share)), round(s.vision_warmup * share)
        setting = replace(s, web=web, vision_warmup=max(1, warmup) if s.vision_warmup else 0)
        return replace(self, setting=setting, plan=self.plan.scaled(share))

    def arm(self, design: Design, pairs: float, settings: Settings) -> Arm:
        """The design with so many pairs of pretraining, rounded to whole batches, at least one each stage."""
        batches = max(len(design.stages), round(pairs / self.setting.batch))
        ends = [round(batches * end) for end in itertools.accumulate(share for share, _ in design.stages)]
        counts = [max(1, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = tuple(
            replace(part, updates=count * part.updates_per_batch, lr_factor=settings["lr_factor"])
            for count, (_, part) in zip(counts, design.stages, strict=True)
        )
        return Arm(
            name=design.name,
            label=design.label,
            family=design.family,
            pretraining=parts,
            fine_tuning=FineTuning(budgets=(self.plan.tuning_updates,), lr_factor=settings["tuning_lr_factor"]),
            config={
                "dropout": settings["dropout"],
                "init_std": settings["init_factor"] * self.setting.hidden**-0.5,
            },
        )

    def defaults(self) -> dict[str, float]:
        return {name: one.default for name, one in self.plan.space.items()}

    def pairs_for(self, design: Design, budget: str, costs: Mapping[str, Any]) -> float:
        """How many pairs the design gets for a budget."""
        if budget == "pairs":
            return self.plan.pairs
        own, reference = (costs["designs"][name][budget] for name in (design.name, self.plan.reference))
        return self.plan.pairs * reference / own


def pairs_of(arm: Arm, batch: int) -> int:
    """How many pairs, or images or texts alone, pretraining reads; one counts once however many updates use it."""
    return sum(part.updates // part.updates_per_batch for part in arm.pretraining) * batch


# ---- Costs -----------------------------------------------------------------------------------------------------


def measure_costs(board: Board, data: Any) -> dict[str, Any]:
    """Return for each design `flops` and `seconds` (CPU, one thread) per pair, `parameters`, and `memory` in MB.

    FLOPs are those of matrix products and convolutions, forward and backward, over the updates' own padded batches.
    Designs take turns, so that a busy machine slows all of them. Reads the file of an earlier measurement if there is
    one: budgets must not change between sittings.

    Raises:
        FileNotFoundError: neither an earlier measurement nor data.
    """
    file = board.costs
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    if data is None:
        raise FileNotFoundError(f"{file}: nothing is finished; run without --finished first")
    from pretraining_study.cost import update_costs, update_flops

    alone = {}  # (design, stage) -> an arm of this stage alone
    for design in board.designs:
        for number, (_, part) in enumerate(design.stages):
            stage = Arm(name=f"{design.name} {number}", label="", family=design.family, pretraining=(part,))
            alone[design.name, number] = replace(stage, pretraining=(replace(part, updates=ROUNDS),))
    seconds = update_costs(list(alone.values()), data, ROUNDS)
    found: dict[str, Any] = {}
    few = data.small()
    for design in board.designs:
        own = {"flops": 0.0, "seconds": 0.0}
        for number, (share, part) in enumerate(design.stages):
            arm = alone[design.name, number]
            updates = share * part.updates_per_batch / board.setting.batch  # of a pair
            own["flops"] += updates * update_flops(arm, data, ROUNDS)
            own["seconds"] += updates * seconds[arm.name]
        found[design.name] = own | measure_memory(board, design, few)
    made = {"designs": found, "commit": commit(), "load": round(os.getloadavg()[0], 2)}
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():  # another process may have been faster
        write_whole(file, made)
    return json.loads(file.read_text(encoding="utf-8"))


def measure_memory(board: Board, design: Design, data: Any) -> dict[str, float]:
    """Return `parameters`, and `memory`: the most that a new process grows by during pretraining, in MB."""
    arm = board.arm(design, 8 * board.setting.batch, board.defaults())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_pretrain_measured, arm, data).result()


def _pretrain_measured(arm: Arm, data: Any) -> dict[str, float]:
    import psutil
    import torch

    from pretraining_study import adapter
    from pretraining_study.learn import pretraining
    from pretraining_study.run import parameters

    torch.set_num_threads(1)
    me, done, seen = psutil.Process(), threading.Event(), data.for_family(arm.family)
    split, _ = seen.train(1), seen.web
    before = me.memory_info().rss
    peak = [before]

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], me.memory_info().rss)

    threading.Thread(target=watch, daemon=True).start()
    model = adapter.build(arm.family, arm.config, seen)
    for _ in pretraining(model, arm, seen, split, seed=1):
        pass
    done.set()
    return {"parameters": parameters(model), "memory": round((peak[0] - before) / 2**20, 1)}


# ---- Search ----------------------------------------------------------------------------------------------------


def suggest(plan: BoardPlan, number: int, earlier: Sequence[tuple[Settings, float | None]]) -> dict[str, float]:
    """Return the settings of a trial. They depend only on its number and on the earlier trials, (settings, score)
    each, so a killed search continues as if it had not stopped."""
    if number == 0:
        return {name: one.default for name, one in plan.space.items()}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {
        name: optuna.distributions.FloatDistribution(one.low, one.high, log=not one.step, step=one.step or None)
        for name, one in plan.space.items()
    }
    sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=STARTUP_TRIALS)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for settings, score in earlier:
        state = optuna.trial.TrialState.FAIL if score is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(params=dict(settings), distributions=dict(space), value=score, state=state)
        )
    asked = study.ask(dict(space))
    return {name: round(asked.params[name], 4) for name in space}


def score(plan: BoardPlan, val: Mapping[str, float]) -> float:
    """Return the mean over the tasks of their primary metric, in units of the smallest difference that matters."""
    parts = [(-1 if METRICS[m][1] else 1) * val[m] / plan.smallest[m] for m in PRIMARY.values() if m in val]
    return sum(parts) / len(parts)


def trials_of(board: Board, design: Design, most: int) -> list[dict[str, Any]]:
    """Return the finished trials, in order, up to the first that is missing."""
    found: list[dict[str, Any]] = []
    while len(found) < most and (made := board.results.read(next_trial(board, design, found), board.plan.search_seed)):
        found.append(made)
    return found


def next_trial(board: Board, design: Design, earlier: Sequence[Mapping[str, Any]]) -> Arm:
    settings = suggest(board.plan, len(earlier), [(trial["settings"], trial["score"]) for trial in earlier])
    return board.arm(design, board.plan.pairs, settings)


def settings_of(arm: Arm, board: Board) -> dict[str, float]:
    return {
        "lr_factor": arm.pretraining[0].lr_factor,
        "tuning_lr_factor": arm.fine_tuning.lr_factor,
        "init_factor": round(arm.config["init_std"] * board.setting.hidden**0.5, 4),
        "dropout": arm.config["dropout"],
    }


def best(trials: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first of equals, so the defaults if nothing is better.

    Raises:
        ValueError: every trial diverged.
    """
    finished = [trial for trial in trials if trial["score"] is not None]
    if not finished:
        raise ValueError("every trial of the search diverged; widen its space")
    return max(finished, key=lambda trial: trial["score"])


# ---- Runs ------------------------------------------------------------------------------------------------------


def train_and_measure(arm: Arm, seed: int, data: Any, *, on: str) -> dict[str, Any]:
    """Pretrain, fine-tune on every task that model and data have, and measure on `on`: test, or val for the search,
    which leaves out what it is not judged by."""
    import torch

    from pretraining_study import adapter, measure
    from pretraining_study.learn import Learner
    from pretraining_study.run import parameters, pretrained
    from pretraining_study.vision_warmup import vision_warmup

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    data = data.for_family(arm.family)
    split, held_out = data.train(seed), getattr(data, on)
    _ = vision_warmup(arm.family, data), held_out.true_NI  # once per process: no run's time
    began, start = time.perf_counter(), time.process_time()
    model = pretrained(arm, seed, data, split)
    seconds = {"pretraining": time.process_time() - start, "fine-tuning": 0.0, "measuring": 0.0}
    values: dict[str, float] = {}
    tasks = [task for task in data.tasks if on == "test" or task in PRIMARY]
    for task in filter(partial(adapter.can, model), tasks):
        start = time.process_time()
        learner = Learner(copy.deepcopy(model), data, split, seed=seed, lr=data.setting.lr * arm.fine_tuning.lr_factor)
        learner.learn(task, arm.fine_tuning.budgets[0])
        seconds["fine-tuning"] += time.process_time() - start
        start = time.process_time()
        if task == "captioning":
            values["nll"] = measure.nll(learner.model, held_out)
            values |= measure.captions(learner.model, held_out, data) if on == "test" else {}
        elif task == "vqa":
            assert learner.head is not None
            values |= measure.answers(learner.model, learner.head, held_out, data)
        elif task in ROWS:
            assert learner.head is not None
            values |= measure.judgments(learner.model, learner.head, held_out, task)
        else:
            values["r1"] = measure.retrieval(learner.model, held_out, among_few=True)["r1"]
        seconds["measuring"] += time.process_time() - start
    return {
        "arm": arm.name,
        "seed": seed,
        on: values,
        "pairs": pairs_of(arm, data.setting.batch),
        "updates": arm.updates,
        "parameters": parameters(model),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "wall_seconds": round(time.perf_counter() - began, 2),
        "load": round(os.getloadavg()[0], 2),
    }


def measure_text_alone(board: Board, data: Any, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Return for each `seed` what texts give without images (`measure.text_alone`), and chance of R@1 among ten.

    data: None returns an earlier measurement, or nothing.
    """
    from pretraining_study import measure

    file = board.text_alone
    kept: list[dict[str, float]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if data is not None and (missing := set(seeds) - {row["seed"] for row in kept}):
        chance = {"r1": 100 / measure.CANDIDATES}
        kept += [{"seed": seed} | measure.text_alone(data, seed) | chance for seed in sorted(missing)]
        write_whole(file, kept)
    return kept


def search(board: Board, data: Any, trials: int) -> Iterator[str]:
    """Run the missing trials, the first of each design first. Yields a line on each."""
    for number, design in itertools.product(range(trials), board.designs):
        earlier = trials_of(board, design, number)
        if len(earlier) < number:  # another process is at it
            continue
        arm = next_trial(board, design, earlier)
        with board.results.claimed(arm, board.plan.search_seed) as mine:
            if not mine or board.results.read(arm, board.plan.search_seed) is not None:
                continue
            try:
                made = train_and_measure(arm, board.plan.search_seed, data, on="val")
                made["score"] = round(score(board.plan, made["val"]), 4)
            except FloatingPointError as error:
                made = {"arm": arm.name, "seed": board.plan.search_seed, "score": None, "error": str(error)}
            board.results.write(arm, board.plan.search_seed, {**made, "settings": settings_of(arm, board)})
        yield f"{design.name}, trial {number + 1} of {trials}: score {made['score']}"


def chosen_arms(board: Board, costs: Mapping[str, Any], trials: int) -> dict[tuple[str, str], Arm]:
    """Return (budget, design) -> its arm, for the designs whose search has ended."""
    found = {}
    for design in board.designs:
        done = trials_of(board, design, trials)
        if len(done) == trials:
            settings = best(done)["settings"]
            for budget in BUDGETS:
                found[budget, design.name] = board.arm(design, board.pairs_for(design, budget, costs), settings)
    return found


def compare_all(
    board: Board, data: Any, costs: Mapping[str, Any], trials: int, seeds: Sequence[int], budgets: Sequence[str]
) -> Iterator[str]:
    """Run what is missing on test, budget by budget and seed by seed. Yields a line on each."""
    arms = chosen_arms(board, costs, trials)
    for budget, seed, design in itertools.product(budgets, seeds, board.designs):
        arm = arms.get((budget, design.name))
        if arm is None or board.results.read(arm, seed) is not None:
            continue
        with board.results.claimed(arm, seed) as mine:
            if not mine or board.results.read(arm, seed) is not None:
                continue
            made = train_and_measure(arm, seed, data, on="test")
            board.results.write(arm, seed, made)
        took = sum(made["seconds"].values())
        yield f"{budget}, {design.name}, seed {seed}: {_print(made['test'])}; {took:.0f} CPU s"


def _print(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def load_recorded(board: Board) -> None:
    """Take over the costs and runs that benchmarks/results has: those of an earlier sitting, or of another machine.

    Raises:
        ValueError: there are none, or they were made with another setting, plan or other designs.
    """
    kept = read_recorded(board.figures, board.made_of)
    board.costs.parent.mkdir(parents=True, exist_ok=True)
    if not board.costs.exists():
        write_whole(board.costs, kept["costs"])
    if not board.text_alone.exists():
        write_whole(board.text_alone, kept["text_alone"])
    for design in board.designs:
        for number, trial in enumerate(kept["trials"][design.name]):
            arm = next_trial(board, design, trials_of(board, design, number))
            if settings_of(arm, board) == trial["settings"]:
                board.results.add_missing(arm, board.plan.search_seed, trial)
    arms = chosen_arms(board, kept["costs"], min(map(len, kept["trials"].values())))
    for budget, results in kept["results"].items():
        for result in results:
            if (budget, result["arm"]) in arms:
                board.results.add_missing(arms[budget, result["arm"]], result["seed"], result)


def collect(
    board: Board, costs: Mapping[str, Any], trials: int, seeds: Sequence[int]
) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """Return budget -> design -> seed -> result, of the finished runs."""
    arms = chosen_arms(board, costs, trials)
    return {
        budget: {
            design.name: {
                seed: made
                for seed in seeds
                if (arm := arms.get((budget, design.name))) and (made := board.results.read(arm, seed))
            }
            for design in board.designs
        }
        for budget in BUDGETS
    }
