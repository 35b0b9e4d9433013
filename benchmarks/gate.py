"""How often the gate errs and what it finds, next to common tests, in simulated scenarios.

    make gate                                             # 10,000 comparisons between equals of each scenario
    python benchmarks/gate.py --comparisons 2000 --scenarios exponential "rare, 50"   # names that begin so

gate_scenarios.py draws comparisons of two variants on one test. In the first run the variants are equally good: a
promotion is false. In the second, a fifth as large, one is better, by as much as the oracle finds in 80% of the cases.
In the third, a tenth, it is better by the median of the minimum detectable gains that the gate stated in the first:
the gate should find it in 80%. All methods decide on the same draws, one-sided at 5%:

- gate: metrics/gain.py and the decision of registry/promotion/gate.py, as `vlp promote` and `vlp compare` call them.
  `shown` is the statistical test alone; `promote` also demands that this seed of the better variant is better. On the
  first comparisons of each batch the decision is checked against the gate's own function, which also checks its inputs.
- t-test: paired, over items (lmms-eval's comparison of two runs; items of several seeds are averaged).
- McNemar: exact, over items of the first seeds; for right and wrong answers only.
- bootstrap: percentile, over items (of several seeds: averaged).
- oracle: has the scenario's own distribution. It promotes if the gain exceeds the 95% quantile of gains between equals,
  which are drawn separately.

The 95% interval (2.5% at each end) is that of `Gain.interval`; its width is given relative to the range of the middle
95% of the gains between equals.

Batches of 1,000 comparisons are stored as they finish, with a seed each, so a run that was interrupted goes on, and
gives the same numbers. A batch counts for the code that made it: after a change it is simulated again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from gate_scenarios import SCENARIOS, Draws, Scenario, draw, true_gain
from numpy.typing import NDArray
from scipy import stats

from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.metrics.score import Evidence, FloatArray
from vlp_models.params import GateParams, PromotionParams
from vlp_models.registry.promotion.gate import Measurement, compare_to_champion, share_left

ALPHA, POWER = 0.05, 0.8
ENDS = 0.025  # error at each end of the 95% interval
DRAWN = 200  # comparisons drawn at a time
BATCH = 1000  # comparisons stored at a time
CHECKED = 2  # comparisons of each draw that the gate's own function decides as well
SHARES = {"equal": 1.0, "better": 0.2, "detectable": 0.1}  # comparisons of each run, of those between equals
PARAMS = PromotionParams()
ROOT = Path(__file__).parents[1]
# A stored record counts for these sources: the simulation's own, and what decides.
SIMULATION = ("benchmarks/gate.py", "benchmarks/gate_scenarios.py")
DECISION = (
    "vlp_models/metrics/gain.py",
    "vlp_models/metrics/bootstrap.py",
    "vlp_models/metrics/score.py",
    "vlp_models/registry/promotion/gate.py",
)


# The oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the simulation has of a scenario before any decision.

    critical   the gain that equals exceed in 5% of the comparisons
    middle     range of the middle 95% of the gains between equals
    betters    rising values of `better` [6]; the second one exceeds `critical` in 80% of the comparisons
    gains      the true gains at these, in percent
    deviation  true deviation of one run over seeds
    """

    critical: float
    middle: float
    betters: list[float]
    gains: list[float]
    deviation: float


def prepare(name: str, seed: int) -> dict[str, Any]:
    scenario, rng = SCENARIOS[name], np.random.default_rng([seed, *name.encode()])
    single = dataclasses.replace(scenario, looks=1)

    def sample(better: float, seed: int, size: int) -> FloatArray:
        generator = np.random.default_rng(seed)
        return np.concatenate([draw(single, generator, better, DRAWN).gains() for _ in range(size // DRAWN)])

    low, missed, critical, high = np.quantile(
        sample(0.0, int(rng.integers(2**31)), 20_000), [ENDS, 1 - POWER, 1 - ALPHA, 1 - ENDS]
    )
    if scenario.gains:  # a better variant's gains are shifted
        better = float(critical - missed) / 100 + 1e-8  # of gains in steps, those at the limit are above it
    else:
        shared_seed, below, above = int(rng.integers(2**31)), 0.0, 1.0 if scenario.corpus else 3.0
        for _ in range(12):
            better = (below + above) / 2
            power = float((sample(better, shared_seed, 4000) > critical).mean())
            below, above = (better, above) if power < POWER else (below, better)
    betters = [factor * better for factor in (0, 1, 1.25, 1.5, 2, 3) if not scenario.corpus or factor * better <= 1]
    gains = [true_gain(scenario, better) for better in betters]
    if gains[0] is None:
        # Less the gain of equals on the same draws: that of the best of several is above 0.
        simulated = [float(sample(better, 1, 4000).mean()) for better in betters]
        gains = [gain - simulated[0] for gain in simulated]
    many = dataclasses.replace(scenario, items=20_000, clusters=1, cluster_noise=0.0, seeds=1)  # noise averages out
    equals = draw(many, rng, 0.0, DRAWN, one_test=True).gains() if scenario.seed and not scenario.gains else [0.0]
    # Scores that are drawn as gains have the seed's effect in percent.
    deviation = 100 * scenario.seed if scenario.gains else float(np.std(equals)) / math.sqrt(2)
    setup = Setup(
        critical=float(critical),
        middle=float(high - low),
        betters=betters,
        gains=[float(gain or 0) for gain in gains],
        deviation=deviation,
    )
    return dataclasses.asdict(setup)


# Decisions


def decide_by_common_tests(drawn: Draws) -> dict[str, NDArray[np.bool_]]:
    """Return what the other methods promote [B]."""
    if drawn.item_gains is None:
        return {}
    gain_BN, first_BN = drawn.item_gains
    items = gain_BN.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        t_B = gain_BN.mean(axis=1) / (gain_BN.std(axis=1, ddof=1) / math.sqrt(items))
    decisions = {
        "t-test": stats.t.sf(np.nan_to_num(t_B), items - 1) <= ALPHA,
        "bootstrap": (_draw_counts(items) @ gain_BN.T <= 0).mean(axis=0) <= ALPHA,
    }
    if drawn.is_binary:
        wins_B, losses_B = (first_BN > 0).sum(axis=1), (first_BN < 0).sum(axis=1)
        decisions["McNemar"] = stats.binom.sf(wins_B - 1, wins_B + losses_B, 0.5) <= ALPHA
    return decisions


@functools.lru_cache(maxsize=1)
def _draw_counts(items: int) -> FloatArray:
    """Return how often each item is drawn, as a share of all [S, N]."""
    counts_SN = np.random.default_rng(0).multinomial(items, np.full(items, 1 / items), size=2000)
    return np.asarray(counts_SN / items)


def decide_by_gate(drawn: Draws, alphas_B: Sequence[float], seed_std: float, test: str = "") -> dict[str, FloatArray]:
    """Return of each comparison what the gate finds [B]: promoted, shown, low, high, detectable.

    Args:
        test: a file with another `gain_over_seeds`.

    Raises:
        RuntimeError: the gate's own function decides otherwise.
    """
    groups = [f"{i:05d}" for i in range(drawn.challenger_BRGK.shape[2])]
    measure = load_test(test) if test else gain_over_seeds
    columns: dict[str, list[float]] = {name: [] for name in ("gate", "gate, shown", "low", "high", "detectable")}
    for index, (challenger_RGK, champion_RGK, alpha) in enumerate(
        zip(drawn.challenger_BRGK, drawn.champion_BRGK, alphas_B, strict=True)
    ):
        sides = [
            [Evidence(groups=groups, parts_NK=parts, statistic=drawn.statistic, items=groups) for parts in parts_RGK]
            for parts_RGK in (challenger_RGK, champion_RGK)
        ]
        gain = measure(*sides, seed_std=seed_std, resamples=PARAMS.resamples, seed=PARAMS.seed)
        assert gain is not None
        shown = gain.p_value(0.0) <= alpha and gain.value > 0
        first, second = (drawn.statistic(parts.sum(axis=0)[None])[0] for parts in (challenger_RGK[0], champion_RGK[0]))
        low, high = gain.interval(ENDS)
        promoted = shown and bool(first > second)
        values = (promoted, shown, low, high, gain.detectable(0.0, ALPHA, POWER))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(float(value))
        if not test and index < CHECKED and promoted != _promotes(sides, alpha, seed_std):
            raise RuntimeError(f"the gate's own function decides otherwise: it promotes: {not promoted}")
    return {name: np.array(column) for name, column in columns.items()}


@functools.lru_cache(maxsize=1)
def load_test(path: str) -> Any:
    """Return `gain_over_seeds` of a file."""
    spec = importlib.util.spec_from_file_location("test_of_a_gain", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module.gain_over_seeds


def _promotes(sides: Sequence[Sequence[Evidence]], alpha: float, seed_std: float) -> bool:
    runs = [
        [
            Measurement(metric="m", test="t", scorer="", evidence=evidence, slices=[()] * len(evidence.groups))
            for evidence in side
        ]
        for side in sides
    ]
    rule = GateParams(metric="m", direction="higher", seed_std=seed_std)
    others = runs[0][1:], runs[1][1:]
    return compare_to_champion(runs[0][0], runs[1][0], rule, PARAMS, alpha=alpha, other_seeds=others).passed


def errors_allowed(scenario: Scenario, size: int) -> list[float]:
    """Return the alpha of each of `size` decisions."""
    if scenario.looks == 1:
        return [ALPHA / scenario.candidates] * size
    left = [share_left(PARAMS, refusals) for refusals in range(size + 1)]
    return [PARAMS.error_budget * (before - after) for before, after in itertools.pairwise(left)]


def simulate(
    name: str, seed: int, run: str, batch: int, size: int, better: float, gain: float, setup: Setup, test: str
) -> dict[str, Any]:
    """Return counts of one batch of comparisons. gain: the true one. With several looks, a series is one trial."""
    scenario, rng = SCENARIOS[name], np.random.default_rng([seed, *name.encode(), list(SHARES).index(run), batch])
    is_series = scenario.looks > 1 and run == "equal"
    step = scenario.looks if scenario.looks > 1 else DRAWN
    alphas = errors_allowed(scenario, step)
    if run != "equal":
        alphas = [alphas[0]] * step
    parts: dict[str, list[NDArray[Any]]] = {}
    for start in range(0, size, step):
        count = min(step, size - start)
        drawn = draw(scenario, rng, better, count, one_test=scenario.looks > 1)
        decided: dict[str, NDArray[Any]] = {**decide_by_common_tests(drawn), "oracle": drawn.gains() > setup.critical}
        decided |= decide_by_gate(drawn, alphas[:count], scenario.stated * setup.deviation, test)
        for column, values in decided.items():
            parts.setdefault(column, []).append(values)
    low, high, detectable = (np.concatenate(parts.pop(column)) for column in ("low", "high", "detectable"))
    promoted = {
        method: int(sum(values.any() if is_series else values.sum() for values in chunks))
        for method, chunks in parts.items()
    }
    return {
        "trials": len(parts["oracle"]) if is_series else size,
        "promoted": promoted,
        "below": int((gain < low).sum()),
        "above": int((gain > high).sum()),
        "width": float((high - low).mean()),
        "detectable": float(np.median(detectable)),
    }


# Runs


class Records:
    """Finished parts of the simulation in a file of JSON lines, by what they depend on."""

    def __init__(self, path: Path) -> None:
        self.path, self.records = path, dict[str, Any]()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                key, value = json.loads(line)
            except ValueError:  # empty, or the line that was being written when the run ended
                continue
            self.records[key] = value

    def add(self, key: str, value: Any) -> None:
        self.records[key] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([key, value])}\n")  # on a line of its own, also after one that was cut off


def run_simulation(
    names: Sequence[str], comparisons: int, seed: int, pool: Executor, records: Records, test: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the result of each scenario as it is finished. What `records` has is not simulated again."""
    simulation, decision = _hash(SIMULATION), _hash((*SIMULATION, *DECISION, *filter(None, [test])))
    setup_keys = {name: f"{simulation} {seed} {name}" for name in names}
    pending = {pool.submit(prepare, name, seed): name for name in names if setup_keys[name] not in records.records}
    for future in as_completed(pending):
        records.add(setup_keys[pending[future]], future.result())
    setups = {name: Setup(**records.records[key]) for name, key in setup_keys.items()}

    def finish(name: str, runs: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
        """Simulate these runs, each with its true gain, as far as they are not recorded, and return their batches."""
        setup, keys, futures = setups[name], dict[str, list[str]](), dict[Any, str]()
        for run, gain in runs.items():
            better = float(np.interp(gain, setup.gains, setup.betters))
            for batch, size in enumerate(_batch_sizes(comparisons, run)):
                key = f"{decision} {seed} {name} {run} {batch} {size}"
                keys.setdefault(run, []).append(key)
                if key not in records.records:
                    futures[pool.submit(simulate, name, seed, run, batch, size, better, gain, setup, test)] = key
        for future in as_completed(futures):
            records.add(futures[future], future.result())
        return {run: [records.records[key] for key in keys[run]] for run in runs}

    for name in names:
        setup = setups[name]
        batches = finish(name, {"equal": 0.0, "better": setup.gains[1]})
        detectable = float(np.mean([record["detectable"] for record in batches["equal"]]))
        # A variant cannot be better than right on everything.
        if SCENARIOS[name].is_one_decision and detectable <= setup.gains[-1]:
            batches |= finish(name, {"detectable": detectable})
        yield summarize(name, setup, batches)


def _hash(sources: Sequence[str]) -> str:
    return hashlib.sha256(b"".join((ROOT / source).read_bytes() for source in sources)).hexdigest()[:16]


def _batch_sizes(comparisons: int, run: str) -> list[int]:
    total = round(comparisons * SHARES[run])
    return [min(BATCH, total - start) for start in range(0, total, BATCH)]


def summarize(name: str, setup: Setup, batches: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rates of one scenario, in percent."""
    scenario = SCENARIOS[name]

    def rate(run: str, count: str, method: str = "") -> float | None:
        if run not in batches:
            return None
        counts = [record[count][method] if method else record[count] for record in batches[run]]
        return round(100 * sum(counts) / sum(record["trials"] for record in batches[run]), 2)

    def mean(run: str, column: str) -> float:
        return float(np.mean([record[column] for record in batches[run]]))

    result: dict[str, Any] = {
        "scenario": name,
        "about": scenario.about,
        "unlike": scenario.is_unlike,
        "groups": scenario.groups,
        "budget": 100 * (PARAMS.error_budget if scenario.looks > 1 else ALPHA),
        "trials": {run: sum(record["trials"] for record in records) for run, records in batches.items()},
        "gain_in_points": round(setup.gains[1], 3),
        "percent": {
            method: {"false": rate("equal", "promoted", method), "power": rate("better", "promoted", method)}
            for method in batches["equal"][0]["promoted"]
        },
    }
    if scenario.is_one_decision:
        result["interval"] = {
            f"gain_{run}": {
                "covered": round(100 - (rate(run, "below") or 0) - (rate(run, "above") or 0), 2),
                "true_below": rate(run, "below"),
                "true_above": rate(run, "above"),
                "width": round(mean(run, "width") / setup.middle, 3),
            }
            for run in ("equal", "better")
        }
        result["detectable"] = {
            "relative_to_oracle": round(mean("equal", "detectable") / setup.gains[1], 3),
            "relative_at_gain": round(mean("better", "detectable") / setup.gains[1], 3),
            "power": rate("detectable", "promoted", "gate, shown"),
        }
    return result


COLUMNS = ("false", "t-test", "power", "oracle", "cover 0", "cover +", "width", "detect", "found")


def format_row(result: dict[str, Any]) -> str:
    """Return one line of the printed table."""
    percent, interval, detectable = result["percent"], result.get("interval", {}), result.get("detectable", {})
    values = [
        percent["gate, shown"]["false"],
        percent.get("t-test", {}).get("false"),
        percent["gate, shown"]["power"],
        percent["oracle"]["power"],
        *(interval.get(f"gain_{run}", {}).get("covered") for run in ("equal", "better")),
        interval.get("gain_better", {}).get("width"),
        detectable.get("relative_to_oracle"),
        detectable.get("power"),
    ]
    digits = [2 if column in ("width", "detect") else 1 for column in COLUMNS]
    cells = ["" if value is None else f"{value:.{n}f}" for value, n in zip(values, digits, strict=True)]
    return f"{result['about'][:70]:70} {result['groups']:5} " + " ".join(f"{cell:>7}" for cell in cells)


def choose_scenarios(starts: Sequence[str]) -> list[str]:
    """Return the scenarios whose names begin so; all without an argument."""
    names = [name for name in SCENARIOS if not starts or name.startswith(tuple(starts))]
    if not names:
        raise SystemExit(f"no scenario begins with {', '.join(starts)}; there are: {', '.join(SCENARIOS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=10_000, help="between equals of each scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenarios", nargs="+", default=[], help="beginnings of names; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--test", default="", help="a file with another gain_over_seeds, such as an earlier one")
    parser.add_argument("--records", type=Path, default=ROOT / ".work/gate.jsonl", help="what is finished")
    parser.add_argument("--out", type=Path, help="a file of the results")
    options = parser.parse_args()
    names, results, start = choose_scenarios(options.scenarios), [], time.monotonic()
    print(f"{'':70} items " + " ".join(f"{column:>7}" for column in COLUMNS), flush=True)
    # Spawned, so that each process has one thread.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    context, records = multiprocessing.get_context("spawn"), Records(options.records)
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        for result in run_simulation(names, options.comparisons, options.seed, pool, records, options.test):
            results.append(result)
            minutes = (time.monotonic() - start) / 60
            left = minutes * (len(names) / len(results) - 1)
            print(f"{format_row(result)}  {len(results)} of {len(names)}, about {left:.0f} min left", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
