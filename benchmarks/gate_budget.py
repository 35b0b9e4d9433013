"""Does the error budget hold over a task's life? Series of weekly decisions in which no challenger is ever better.

    python benchmarks/gate_budget.py --out benchmarks/results/gate_budget.json     # continues what is in the file

A series is a task: one champion, a test, and a challenger a week from fresh seeds, as good as the champion. It errs if
any of them is promoted. The test stays the same, gains items every week, or is replaced every ten weeks, in whole or in
half. All challengers of a series meet the same champion on the same items, so their gains depend on each other.

- answers: right or wrong, 60% right.
- skewed: gains with many small wins and few large losses, a mean of zero.

Every decision is `compare_to_champion`'s, at the error that `spend_budget` allows. `per test` is the rule of a budget
for each test, a constant share of the rest at each decision, which starts again if the test changes in any way.

The gate is run where a normal approximation finds p below `MARGIN` times the allowed error. To check that nothing is
missed so, a sample of the others with the smallest p is run as well.

The part `power` is the probability to promote a challenger that the first comparison would find with 80%, after so
many refusals, by several rules:

- parts: the shipped one, a part of the budget that falls like 1 / k^2.
- constant share: each decision spends a tenth of what is left.
- discarding: ADDIS spending (Tian and Ramdas, 2021, "Online control of the familywise error rate"), in which p-values
  above 0.5 cost nothing. It needs independent p-values.
- e-value: the most powerful one, with the true gain and its deviation given; promotes if it is at least 1 / error.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vlp_models.metrics import gain
from vlp_models.metrics.score import Evidence, FloatArray, mean_percent
from vlp_models.params import GateParams, PromotionParams
from vlp_models.registry import promotion
from vlp_models.registry.promotion.error_budget import share_left, spend_budget
from vlp_models.registry.promotion.gate import Measurement, compare_to_champion

Scores = NDArray[np.float32]

ITEMS = 300
GROWTH = 3  # items a week
REPLACED_EVERY = 10  # weeks
CHECKPOINTS = (50, 200)  # weeks
MARGIN = 3
CHECKED = 200  # decisions that were skipped, per cell
TESTS = {
    "fixed": "the same test",
    "growing": "gains 3 items a week",
    "replaced": "replaced every 10 weeks",
    "half": "half of it replaced every 10 weeks",
}
PROMOTION = Path(promotion.__file__).parent
SOURCES = (Path(__file__), Path(gain.__file__), PROMOTION / "gate.py", PROMOTION / "error_budget.py")
SEED_STD = {"answers": 0.08, "skewed": 0.12}  # of a run's own effect on all items, in units of an item's ease or gain


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the result. weeks: length of its series."""

    kind: str
    test: str
    rule: str
    weeks: int
    series: int
    seed: int


class Tasks:
    """Tests and champions of many series at once. Suffixes: S series, N items, W weeks."""

    def __init__(self, kind: str, series: int, rng: np.random.Generator) -> None:
        self.kind, self.rng = kind, rng
        self.spread = math.sqrt(1 + 0.8**2 + SEED_STD[kind] ** 2)  # of ease, noise and seed
        self.champion_S1 = rng.normal(0, SEED_STD[kind], (series, 1))
        self.ease_SN = np.zeros((series, 0), np.float32)
        self.score_SN = np.zeros((series, 0), np.float32)
        self.add(ITEMS)

    def add(self, count: int) -> None:
        """Add fresh items at the end, with the champion's score on each."""
        shape = (len(self.champion_S1), count)
        if self.kind == "answers":
            ease_SN = self.rng.standard_normal(shape, dtype=np.float32)
            score_SN = self._answers(ease_SN, self.champion_S1)
        else:
            ease_SN = self._skewed(shape)  # the champion's part of the gains
            score_SN = np.zeros(shape, np.float32)
        self.ease_SN = np.hstack([self.ease_SN, ease_SN])
        self.score_SN = np.hstack([self.score_SN, score_SN])

    def drop(self, count: int) -> None:
        """Remove the oldest items."""
        self.ease_SN, self.score_SN = self.ease_SN[:, count:], self.score_SN[:, count:]

    def challengers(self, better: float = 0.0) -> Scores:
        """Return the scores of fresh challengers [S, N]."""
        run_S1 = better + self.rng.normal(0, SEED_STD[self.kind], self.champion_S1.shape)
        if self.kind == "answers":
            return self._answers(self.ease_SN, run_S1)
        gain_SN = (self.ease_SN + self._skewed(self.ease_SN.shape)) / np.float32(math.sqrt(2))
        return gain_SN + (run_S1 - self.champion_S1).astype(np.float32)

    def seed_std(self) -> float:
        """Return the standard deviation of a run's value over seeds, in percent."""
        if self.kind == "skewed":
            return 100 * SEED_STD[self.kind]
        # How the share of right answers changes with the sum's mean: the density at its 40% quantile.
        slope = stats.norm.pdf(stats.norm.ppf(0.6)) / math.sqrt(1 + 0.8**2)
        return 100 * SEED_STD[self.kind] * float(slope)

    def _answers(self, ease_SN: Scores, run_S1: FloatArray) -> Scores:
        sum_SN = ease_SN + np.float32(0.8) * self.rng.standard_normal(ease_SN.shape, dtype=np.float32)
        quality = float(stats.norm.ppf(0.6)) * self.spread
        return (sum_SN + (quality + run_S1).astype(np.float32) > 0).astype(np.float32)

    def _skewed(self, shape: tuple[int, ...]) -> Scores:
        return 1 - self.rng.standard_exponential(shape, dtype=np.float32)


class Decider:
    """The gate, and the normal approximation that decides where to run it."""

    def __init__(self, seed_std: float) -> None:
        self.params = PromotionParams()
        self.rule = GateParams(metric="accuracy", direction="higher", seed_std=seed_std)

    def z(self, gain_SN: Scores) -> FloatArray:
        """Return each gain in standard errors [S]."""
        error_S = gain_SN.std(axis=1, ddof=1) * 100 / math.sqrt(gain_SN.shape[1])
        z_S: FloatArray = 100 * gain_SN.mean(axis=1) / np.sqrt(error_S**2 + 2 * self.rule.seed_std_of("accuracy") ** 2)
        return z_S

    def promotes(self, challenger_N: Scores, champion_N: Scores, alpha: float) -> bool:
        names = [str(i) for i in range(len(champion_N))]

        def measured(score_N: Scores) -> Measurement:
            parts_NK = np.column_stack([score_N.astype(np.float64), np.ones(len(score_N))])
            evidence = Evidence(groups=names, parts_NK=parts_NK, statistic=mean_percent, items=names)
            return Measurement(metric="accuracy", test="t", scorer="", evidence=evidence, slices=[()] * len(names))

        sides = measured(challenger_N), measured(champion_N)
        return compare_to_champion(*sides, self.rule, self.params, alpha=alpha).passed


def weekly_tests(tasks: Tasks, test: str, weeks: int) -> Iterator[str]:
    """Change the test of `tasks` week by week; yield its name, which changes with it."""
    version = 0
    for week in range(weeks):
        if test == "growing" and week:
            tasks.add(GROWTH)
            version += 1
        elif test in ("replaced", "half") and week and week % REPLACED_EVERY == 0:
            count = ITEMS if test == "replaced" else ITEMS // 2
            tasks.drop(count)
            tasks.add(count)
            version += 1
        yield f"test {version}"


def allowed_errors(cell: Cell, names: list[str]) -> list[float]:
    """Return the error that each week may spend after refusals in all earlier ones."""
    params, alphas = PromotionParams(), []
    entries: list[dict[str, Any]] = []
    for week, name in enumerate(names):
        contents = (f"challenger {week}", "champion")
        if cell.rule == "task":
            spent = spend_budget(
                entries, params, model="m", test=name, contents=contents, runs=(1, 1, 0), metric="m", rule=GateParams()
            )
            alphas.append(spent.alpha)
            numbers = {"test": name, "metric": "m", "min_gain": 0.0, "runs": 1, "champion_runs": 1}
            entry = {"action": "refused", "model": "m", "content": contents[0], "from_content": contents[1]}
            entries.append({**entry, "decision": {"numbers": numbers}})
        else:
            uses = names[:week].count(name)
            alphas.append(params.error_budget * params.spend * (1 - params.spend) ** uses)
    return alphas


def simulate(cell: Cell) -> dict[str, Any]:
    """Return the share of the series with a false promotion, in percent."""
    rng = np.random.default_rng([cell.seed, *f"{cell.kind} {cell.test}".encode()])
    tasks = Tasks(cell.kind, cell.series, rng)
    decider = Decider(tasks.seed_std())
    # The names of the tests, and with them the errors, do not depend on the scores.
    one_task = Tasks(cell.kind, 1, np.random.default_rng(0))
    alphas = allowed_errors(cell, list(weekly_tests(one_task, cell.test, cell.weeks)))
    first_S = np.full(cell.series, cell.weeks, dtype=np.int64)  # week of the first false promotion
    decisions, skipped = 0, []
    for week, (_, alpha) in enumerate(zip(weekly_tests(tasks, cell.test, cell.weeks), alphas, strict=True)):
        challenger_SN = tasks.challengers()
        z_S = decider.z(challenger_SN - tasks.score_SN)
        open_S = first_S == cell.weeks
        run_S = open_S & (z_S >= stats.norm.isf(min(1.0, MARGIN * alpha)))
        for i in np.flatnonzero(run_S):
            decisions += 1
            if decider.promotes(challenger_SN[i], tasks.score_SN[i], alpha):
                first_S[i] = week
        # The nearest of those that were skipped.
        near = np.argsort(np.where(open_S & ~run_S, z_S, -np.inf))[-math.ceil(CHECKED / cell.weeks) :]
        skipped += [decider.promotes(challenger_SN[i], tasks.score_SN[i], alpha) for i in near]
    return {
        **dataclasses.asdict(cell),
        "about": TESTS[cell.test],
        "budget": 100 * PromotionParams().error_budget,
        "false": {f"{weeks} weeks": round(100 * float((first_S < weeks).mean()), 2) for weeks in CHECKPOINTS},
        "promoted": int((first_S < cell.weeks).sum()),
        "decisions": decisions,
        "skipped": {"checked": len(skipped), "promoted": sum(skipped)},
    }


def power(series: int, seed: int) -> dict[str, Any]:
    """Return the probability to promote a better challenger after 0, 9, 29 and 99 refusals, by rule, in percent."""
    params, kind = PromotionParams(), "answers"
    weeks = (1, 10, 30, 100)
    rng = np.random.default_rng([seed, 1])
    # p-values of one task's weeks, in many series: what the rule that discards depends on, and how often it errs.
    tasks = Tasks(kind, series, rng)
    decider = Decider(tasks.seed_std())
    null_WS = np.stack([decider.z(tasks.challengers() - tasks.score_SN) for _ in range(max(CHECKPOINTS))])
    p_WS = stats.norm.sf(null_WS)

    parts = -np.diff([params.error_budget * share_left(params, k) for k in range(len(p_WS) + 1)])
    shares = params.error_budget * params.spend * (1 - params.spend) ** np.arange(len(p_WS))
    # ADDIS spending with tau = 0.5 and lambda = 0.25: only p-values between the two move on to the next part.
    tau, candidate = 0.5, 0.25
    counted_WS = (p_WS <= tau) & (p_WS > candidate)
    step_WS = np.vstack([np.zeros((1, series), np.int64), counted_WS.cumsum(axis=0)[:-1]])
    discarding_WS = np.minimum(candidate, (tau - candidate) * parts[step_WS])
    alphas = {"parts": parts[:, None], "constant share": shares[:, None], "discarding": discarding_WS}

    # The true gain that the first comparison finds with 80%: by bisection, over fresh tests and champions.
    low, high, better_by = 0.0, 2.0, 1.0
    for _ in range(9):
        better_by = (low + high) / 2
        sample = Tasks(kind, 4 * series, np.random.default_rng([seed, 2]))
        z_S = decider.z(sample.challengers(better_by) - sample.score_SN)
        low, high = (better_by, high) if (z_S >= stats.norm.isf(parts[0])).mean() < 0.8 else (low, better_by)
    better = Tasks(kind, series, np.random.default_rng([seed, 3]))
    challenger_SN = better.challengers(better_by)
    z_S = decider.z(challenger_SN - better.score_SN)

    def gate_finds(alpha: float) -> float:
        likely = np.flatnonzero(z_S >= stats.norm.isf(min(0.5, MARGIN * alpha)))
        return round(
            100 * sum(decider.promotes(challenger_SN[i], better.score_SN[i], alpha) for i in likely) / series, 1
        )

    # By the normal approximation, as the rules differ in the errors alone; the shipped one by the gate as well.
    finds: dict[str, dict[str, float]] = {
        rule: {
            f"comparison {w}": round(100 * float((z_S[:, None] >= stats.norm.isf(a_WS[w - 1])).mean()), 1)
            for w in weeks
        }
        for rule, a_WS in alphas.items()
    }
    expected = float(z_S.mean())  # the e-value's bet: the likelihood ratio of this gain
    log_e_S = expected * z_S - expected**2 / 2
    finds["e-value"] = {
        f"comparison {w}": round(100 * float((log_e_S >= -math.log(parts[w - 1])).mean()), 1) for w in weeks
    }
    finds["the gate"] = {f"comparison {w}": gate_finds(float(parts[w - 1])) for w in weeks}
    # By the same approximation: how often a series errs.
    false = {
        rule: {f"{w} weeks": round(100 * float((p_WS[:w] <= a_WS[:w]).any(axis=0).mean()), 1) for w in CHECKPOINTS}
        for rule, a_WS in alphas.items()
    }
    errors = {
        rule: {f"comparison {w}": float(f"{a_WS[w - 1].mean():.2g}") for w in weeks} for rule, a_WS in alphas.items()
    }
    gain_points = round(100 * float((challenger_SN - better.score_SN).mean()), 1)
    return {"kind": "power", "series": series, "seed": seed, "gain_in_points": gain_points} | {
        "power": finds,
        "false": false,
        "errors": errors,
    }


def cells(series: int, seed: int) -> list[Cell]:
    """Return all cells; the rule per test is a comparison, on three kinds of tests."""
    compared: dict[str, tuple[Iterable[str], Iterable[str]]] = {
        "task": (SEED_STD, TESTS),
        "per test": (["answers"], ["fixed", "growing", "replaced"]),
    }
    return [
        Cell(kind=kind, test=test, rule=rule, weeks=max(CHECKPOINTS), series=series, seed=seed)
        for rule, (kinds, tests) in compared.items()
        for kind in kinds
        for test in tests
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # A row of other code is made again.
    code = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    rows = [row for row in rows if row["code"] == code]

    def save(row: dict[str, Any]) -> None:
        rows.append(row | {"code": code})
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    if not any(row["kind"] == "power" for row in rows):
        save(power(options.series, options.seed))
    for cell in cells(options.series, options.seed):
        if not any(dataclasses.asdict(cell).items() <= row.items() for row in rows):
            save(simulate(cell))


if __name__ == "__main__":
    main()
