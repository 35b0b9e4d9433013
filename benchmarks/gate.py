"""How often the gate errs and what it finds, next to common tests, in simulated scenarios.

    make gate                                             # 10,000 comparisons between equals of each scenario
    python benchmarks/gate.py --comparisons 2000 --scenarios exponential "rare, 50"   # names that begin so
    python benchmarks/gate.py --pages                     # writes the docs' tables; then docs/_ext/figures.py

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
import hashlib
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from gate_decisions import ALPHA, PARAMS, Setup, prepare, simulate
from gate_scenarios import SCENARIOS

BATCH = 1000  # comparisons stored at a time
SHARES = {"equal": 1.0, "better": 0.2, "detectable": 0.1}  # comparisons of each run, of those between equals
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
# A stored record counts for these sources: the simulation's own, and what decides.
SIMULATION = ("benchmarks/gate_decisions.py", "benchmarks/gate_scenarios.py")
DECISION = (
    "vlp_models/metrics/gain.py",
    "vlp_models/metrics/bootstrap.py",
    "vlp_models/metrics/score.py",
    "vlp_models/registry/promotion/gate.py",
)


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
        if SCENARIOS[name].is_one_decision and not SCENARIOS[name].is_limit and detectable <= setup.gains[-1]:
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

    percent = {
        method: {"false": rate("equal", "promoted", method), "power": rate("better", "promoted", method)}
        for method in batches["equal"][0]["promoted"]
    }
    result: dict[str, Any] = {
        "scenario": name,
        "about": scenario.about,
        "family": scenario.family,
        "groups": scenario.groups,
        "budget": 100 * (PARAMS.error_budget if scenario.looks > 1 else ALPHA),
        "trials": {run: sum(record["trials"] for record in records) for run, records in batches.items()},
        "gain_in_points": round(setup.gains[1], 3),
        "percent": percent,
        "is_near_oracle": (percent["gate, shown"]["power"] or 0) >= (percent["oracle"]["power"] or 0) - 5,
        "has_interval": scenario.is_one_decision and not scenario.is_limit,
    }
    if result["has_interval"]:
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


PAGES = [ROOT / f"docs/results/{name}.md" for name in ("gate", "gate-scenarios")]
# Heading on one of the pages -> family of the scenarios in the table below it; and the keys of the columns.
TABLES = {
    "The models are alike": "alike",
    "A model loses much on few items": "unlike",
    "Metrics of a whole test": "corpus",
    "What no test can see": "limit",
}
CELLS = (
    "percent.gate, shown.false",
    "percent.t-test.false",
    "percent.gate, shown.power",
    "percent.oracle.power",
    "interval.gain_equal.covered",
    "interval.gain_better.covered",
    "interval.gain_better.width",
    "detectable.power",
)


def write_tables(pages: Sequence[Path], results: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> None:
    """Write the rows of the tables of some pages; docs/_ext/figures.py checks their figures.

    Args:
        earlier: results of another test, whose false promotions are the second column.
    """
    texts, earlier_of = [page.read_text(encoding="utf-8") for page in pages], {row["about"]: row for row in earlier}
    for heading, family in TABLES.items():
        lines = []
        for result in results:
            if result["family"] == family:
                cells = [_cell(result, key) for key in CELLS]
                cells.insert(1, _cell(earlier_of.get(result["about"], {}), CELLS[0]))
                lines.append(f"| {' | '.join([result['about'], *cells])} |\n")
        # The heading, what is before its table, and the table's two head lines remain.
        head = rf"(?ms)(^#+ {re.escape(heading)}\n(?:(?!^[|#]).*?\n)*?\|.*?\n\|.*?\n)(?:\|.*?\n)*"
        replaced = [re.subn(head, rf"\g<1>{''.join(lines)}", text) for text in texts]
        if sum(count for _, count in replaced) != 1:
            raise SystemExit(f"not one table below the heading {heading!r}")
        texts = [text for text, _ in replaced]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text, encoding="utf-8")


def _cell(result: Any, key: str) -> str:
    for part in key.split("."):
        result = (result or {}).get(part)
    return "" if result is None else f"{result:.{2 if key.endswith('width') else 1}f}"


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
    parser.add_argument("--pages", action="store_true", help="write the docs' tables from the stored results instead")
    options = parser.parse_args()
    if options.pages:
        stored = [json.loads((RESULTS / name).read_bytes()) for name in ("gate.json", "gate_earlier.json")]
        write_tables(PAGES, *stored)
        return
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
