"""How often the gate errs and what it finds, next to common tests, in simulated scenarios.

    python benchmarks/gate.py --comparisons 10000 --out benchmarks/results/gate.json

A scenario draws comparisons of two variants on one test: right or wrong answers or graded scores, of independent or of
clustered items, from one seed or from several. In half of the comparisons the variants are equally good: a promotion is
false. In the other half one is better, by as much as the oracle finds in 80% of the cases. All methods decide on the
same draws, one-sided at 5%:

- gate: registry/promotion/gate.py as `vlp promote` and `vlp compare` call it. `shown` is its statistical test alone;
  `promote` also demands that this seed of the better variant is better.
- t-test: paired, over items (lmms-eval's comparison of two runs; items of several seeds are averaged).
- McNemar: exact, over items of the first seeds; for right and wrong answers only.
- bootstrap: percentile, over items (of several seeds: averaged).
- oracle: has the scenario's own distribution. It promotes if the gain exceeds the 95% quantile of gains between equals,
  which are drawn separately.

Scores are sums of effects, each normal: the ease of the item and of its cluster, the quality of the variant and its
taste for an item, the seed, and the run's own noise on an item and on a cluster. An answer is right if the sum is above
zero; a graded score is a function of it.

In the scenarios of `SKEWED` two variants are equally good on average, but not alike: one wins a little on many items
and loses much on few, or the other way round. Their gains are drawn as such, from a distribution of mean zero; those of
two public models (benchmarks/gains) or of two models of docs/results/runs are recorded, less their mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import zipfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from vlp_models.metrics.score import Evidence, FloatArray, mean_percent
from vlp_models.params import GateParams, PromotionParams
from vlp_models.registry.promotion.gate import Measurement, compare_to_champion, share_left

ALPHA, POWER = 0.05, 0.8
BATCH = 200  # comparisons drawn at a time
GAINS = Path(__file__).parent / "gains"
RUNS = Path(__file__).parents[1] / "docs/results/runs"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Stds are in those of an item's ease.

    accuracy    percent of right answers; graded scenarios start from the same sum
    clusters    items per cluster: a number, or a range from which each cluster's is drawn
    shared      share of the variance of ease that a cluster's items have in common
    noise, cluster_noise, seed    std of a run's own effect on an item, on a cluster, on all items
    taste       std of a variant's own effect on an item, the same for all its runs
    seeds       of each variant
    champions   seeds of the other variant, where they are fewer; 0: as many
    stated      deviation over seeds that the gate is given: a factor of the true one; 0: it is to estimate it
    wilder      factor of the noise of the variant in question; 1: both vary alike
    looks       decisions on one test, each with fresh runs; promotion.error_budget holds for all of them together
    candidates  the best of so many on this test is compared
    gains       distribution of the gains of `draw_gains`; empty: scores are sums of effects
    sign        -1: the other variant's gains
    """

    about: str
    items: int = 300
    kind: str = "binary"
    accuracy: float = 60.0
    clusters: int | tuple[int, int] = 1
    shared: float = 0.0
    noise: float = 0.8
    cluster_noise: float = 0.0
    taste: float = 0.0
    seed: float = 0.0
    seeds: int = 1
    champions: int = 0
    stated: float = 0.0
    wilder: float = 1.0
    looks: int = 1
    candidates: int = 1
    gains: str = ""
    sign: float = 1.0


SCENARIOS = {
    "binary": Scenario(about="300 questions, right or wrong"),
    "graded": Scenario(about="300 scores between 0 and 1", kind="share"),
    "skewed": Scenario(about="300 scores as skewed as CIDEr per image", kind="skewed"),
    "ceiling": Scenario(about="300 questions, 98% right", accuracy=98.0),
    "floor": Scenario(about="300 questions, 3% right", accuracy=3.0),
    "few items": Scenario(about="25 questions, right or wrong", items=25),
    "few skewed": Scenario(about="25 scores as skewed as CIDEr per image", items=25, kind="skewed"),
    "clustered": Scenario(about="60 images, 10 questions each", items=600, clusters=10, shared=0.3, cluster_noise=0.5),
    "uneven": Scenario(
        about="60 images, 1 to 20 questions", items=600, clusters=(1, 20), shared=0.3, cluster_noise=0.5
    ),
    "wilder": Scenario(about="300 graded scores, one variant varies twice as much", kind="share", wilder=2.0),
    "two seeds against one": Scenario(
        about="50 questions, 91% right, 2 seeds against 1", items=50, accuracy=91.0, seeds=2, champions=1
    ),
    "two seeds": Scenario(about="300 questions, 2 seeds each, deviation estimated", seed=0.06, taste=0.4, seeds=2),
    "three seeds": Scenario(about="300 questions, 3 seeds each, deviation estimated", seed=0.06, taste=0.4, seeds=3),
    "ten seeds": Scenario(about="300 questions, 10 seeds each, deviation estimated", seed=0.06, taste=0.4, seeds=10),
    "one seed, stated": Scenario(
        about="300 questions, 1 seed each, deviation stated", seed=0.06, taste=0.4, stated=1.0
    ),
    "three seeds, stated": Scenario(
        about="300 questions, 3 seeds each, deviation stated", seed=0.06, taste=0.4, seeds=3, stated=1.0
    ),
    "repeated looks": Scenario(about="300 questions, 50 decisions on one test", looks=50),
    "best of five": Scenario(about="300 questions, the best of 5 on the test itself", candidates=5),
}
_SHAPES = {
    "exponential": "many small wins, few losses: 1 - exponential",
    "lognormal": "the same with a long tail: mean - lognormal",
    "rare": "5% lose 0.95, the others win 0.05",
    "rare ties": "4% lose 1, 1.5% win 1, the others a little",
    "pope_f1.csv": "POPE-style F1 of two public models",
    "tden-captioning - unified-vlp-captioning:CIDEr": "CIDEr per image, TDEN and Unified VLP on scenes",
    "tden-entailment - vlmo-entailment:accuracy": "entailment, TDEN and VLMo on scenes",
}
_CLUSTERED = {"size": "clusters of 1 to 20, larger ones lose", "pareto sizes": "clusters of Pareto sizes"}
_WINS = ("pope_f1.csv", "tden-captioning - unified-vlp-captioning:CIDEr")  # as recorded, wins are the long tail
SKEWED = {
    f"{kind}, {'reversed, ' if reverse else ''}{items}": Scenario(
        about=f"{items} {'clusters' if kind in _CLUSTERED else 'items'}, {about}{' (reversed)' if reverse else ''}",
        items=items,
        gains=kind,
        sign=-1.0 if reverse else 1.0,
    )
    for kind, about in (_SHAPES | _CLUSTERED).items()
    for reverse, sizes in ((kind in _WINS, (50, 100, 300)), (kind not in _WINS, (50,)))
    for items in sizes
}
SCENARIOS |= SKEWED


@functools.cache
def _recorded(name: str) -> FloatArray:
    """Return the gain on each item of one recorded model over another, less its mean."""
    if name.endswith(".csv"):
        gain_N = np.loadtxt(GAINS / name, skiprows=1)
    else:
        bundles, metric = name.split(":")
        first, second = (_bundled_scores(bundle, metric) for bundle in bundles.split(" - "))
        gain_N = np.array([first[item] - second[item] for item in sorted(first.keys() & second.keys())])
    centered_N: FloatArray = gain_N - gain_N.mean()
    return centered_N


def _bundled_scores(bundle: str, metric: str) -> dict[str, float]:
    """Return item -> its score in a run bundle of the documentation."""
    with zipfile.ZipFile(RUNS / f"{bundle}.run.zip") as archive:
        table = pd.read_parquet(io.BytesIO(archive.read("items.parquet")))
    rows = table[(table["metric"] == metric) & (table["split"] == "test")]
    return {item: parts[0] / parts[1] for item, parts in zip(rows["item"], rows["parts"], strict=True)}


def _sizes(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """Return the number of items of each cluster [B, C]."""
    if kind == "pareto sizes":
        return np.ceil(np.minimum(rng.pareto(1.5, shape) + 1, 100))
    return rng.integers(1, 21, shape).astype(np.float64) if kind == "size" else np.ones(shape)


def draw_gains(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Return gains of mean zero and the number of items that each counts for [B, C]."""
    size_BC = _sizes(kind, rng, shape)
    if kind == "exponential":
        gain_BC = 1 - rng.exponential(size=shape)
    elif kind == "lognormal":
        gain_BC = math.exp(0.5) - rng.lognormal(0, 1, shape)
    elif kind == "rare":
        gain_BC = np.where(rng.random(shape) < 0.05, -0.95, 0.05)
    elif kind == "rare ties":  # 8 lost and 3 won of 200 right or wrong answers, less the mean
        gain_BC = rng.choice(np.repeat([-1.0, 1.0, 0.0], [8, 3, 189]) + 5 / 200, shape)
    elif kind == "size":  # larger clusters lose; the mean over items is zero
        gain_BC = 0.1 * (41 / 3 - size_BC) + rng.normal(0, 0.5, shape)
    elif kind == "pareto sizes":
        gain_BC = rng.normal(0, 1, shape)
    else:
        gain_BC = rng.choice(_recorded(kind), shape)
    return gain_BC, size_BC


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Scores of a batch of comparisons.

    challenger, champion  [B, R, N] between 0 and 1 (skewed: above 0)
    cluster_N  number of each item's cluster
    size_BN    number of items behind each score; None: one
    """

    challenger: FloatArray
    champion: FloatArray
    cluster_N: NDArray[np.int64]
    size_BN: FloatArray | None = None

    def gains(self) -> FloatArray:
        difference_BN = self.challenger.mean(axis=1) - self.champion.mean(axis=1)
        gain_B: FloatArray = 100 * np.average(difference_BN, axis=1, weights=self.size_BN)
        return gain_B


def draw(scenario: Scenario, rng: np.random.Generator, better: float, size: int, *, one_test: bool = False) -> Draws:
    """Draw comparisons of a variant that is `better` (in units of quality, or of the gains) with another one."""
    if scenario.gains:
        gain_BN, size_BN = draw_gains(scenario.gains, rng, (size, scenario.items))
        return Draws(
            challenger=(scenario.sign * gain_BN + better)[:, None],
            champion=np.zeros((size, 1, scenario.items)),
            cluster_N=np.arange(scenario.items),
            size_BN=size_BN,
        )
    cluster_N = _clusters(scenario, rng)
    count, items = int(cluster_N[-1]) + 1, len(cluster_N)
    tests = 1 if one_test else size
    ease_BC = rng.normal(0, math.sqrt(scenario.shared), (tests, count))
    ease_BN = ease_BC[:, cluster_N] + rng.normal(0, math.sqrt(1 - scenario.shared), (tests, items))
    spread = math.sqrt(1 + scenario.noise**2 + scenario.cluster_noise**2 + scenario.taste**2 + scenario.seed**2)
    quality = float(stats.norm.ppf(scenario.accuracy / 100)) * spread

    def side(by: float, runs: int, noise: float) -> FloatArray:
        sums = ease_BN[:, None] + quality + by + rng.normal(0, scenario.seed, (size, runs, 1))
        sums = sums + rng.normal(0, scenario.taste, (size, 1, items)) + rng.normal(0, noise, (size, runs, items))
        if scenario.cluster_noise:
            sums += rng.normal(0, scenario.cluster_noise, (size, runs, count))[:, :, cluster_N]
        if scenario.kind == "binary":
            return (sums > 0).astype(np.float64)
        if scenario.kind == "share":  # linear, so noise leaves the mean as it is
            return 0.5 + 0.1 * sums
        return np.exp(0.6 * sums)  # a skewness of about 4

    challenger = side(better, scenario.seeds * scenario.candidates, scenario.noise * scenario.wilder)
    champion = side(0.0, scenario.champions or scenario.seeds, scenario.noise)
    if scenario.candidates > 1:
        best_B = challenger.mean(axis=2).argmax(axis=1)
        challenger = challenger[np.arange(size), best_B][:, None]
    return Draws(challenger=challenger, champion=champion, cluster_N=cluster_N)


def _clusters(scenario: Scenario, rng: np.random.Generator) -> NDArray[np.int64]:
    if isinstance(scenario.clusters, int):
        return np.arange(scenario.items) // scenario.clusters
    low, high = scenario.clusters
    sizes = rng.integers(low, high + 1, size=scenario.items)
    return np.repeat(np.arange(scenario.items), sizes)[: scenario.items]


def oracle(scenario: Scenario, rng: np.random.Generator, comparisons: int) -> tuple[float, float]:
    """Return the gain that equals exceed in 5% of the comparisons, and the quality that exceeds it in 80%."""
    single = dataclasses.replace(scenario, looks=1)

    def sample(better: float, seed: int, size: int) -> FloatArray:
        generator = np.random.default_rng(seed)
        return np.concatenate([draw(single, generator, better, BATCH).gains() for _ in range(size // BATCH)])

    critical = float(np.quantile(sample(0.0, int(rng.integers(2**31)), comparisons), 1 - ALPHA))
    seed, low, high = int(rng.integers(2**31)), 0.0, 3.0
    for _ in range(14):
        middle = (low + high) / 2
        power = float((sample(middle, seed, min(comparisons, 4000)) > critical).mean())
        low, high = (middle, high) if power < POWER else (low, middle)
    return critical, (low + high) / 2


class Judge:
    """Decides comparisons of one scenario by all methods."""

    def __init__(self, scenario: Scenario, deviation: float) -> None:
        self.scenario = scenario
        self.rule = GateParams(metric="accuracy", direction="higher", seed_std=deviation)
        self.params = PromotionParams()
        counts = np.random.default_rng(0).multinomial(
            scenario.items, np.full(scenario.items, 1 / scenario.items), size=2000
        )
        self.counts_SN = counts / scenario.items

    def others(self, drawn: Draws) -> dict[str, NDArray[np.bool_]]:
        """Return what the other methods promote [B]."""
        difference_BN = drawn.challenger.mean(axis=1) - drawn.champion.mean(axis=1)
        if drawn.size_BN is not None:
            difference_BN = difference_BN * drawn.size_BN
        with np.errstate(divide="ignore", invalid="ignore"):
            t_B = difference_BN.mean(axis=1) / (difference_BN.std(axis=1, ddof=1) / math.sqrt(difference_BN.shape[1]))
        decisions = {
            "t-test": stats.t.sf(np.nan_to_num(t_B), difference_BN.shape[1] - 1) <= ALPHA,
            "bootstrap": (self.counts_SN @ difference_BN.T <= 0).mean(axis=0) <= ALPHA,
        }
        if self.scenario.kind == "binary" and not self.scenario.gains:
            first_BN = drawn.challenger[:, 0] - drawn.champion[:, 0]
            wins_B, losses_B = (first_BN > 0).sum(axis=1), (first_BN < 0).sum(axis=1)
            decisions["McNemar"] = stats.binom.sf(wins_B - 1, wins_B + losses_B, 0.5) <= ALPHA
        return decisions

    def gate(self, drawn: Draws, alphas_B: list[float]) -> dict[str, NDArray[np.bool_]]:
        """Return what the gate promotes, and what its test alone shows [B]."""
        count = int(drawn.cluster_N[-1]) + 1
        names = [f"{i:05d}" for i in range(count)]

        def measured(score_N: FloatArray, size_N: FloatArray) -> Measurement:
            sums = [np.bincount(drawn.cluster_N, weights=w, minlength=count) for w in (score_N * size_N, size_N)]
            parts = np.column_stack(sums).astype(np.float64)
            evidence = Evidence(groups=names, parts_NK=parts, statistic=mean_percent, items=names)
            return Measurement(metric="accuracy", test="t", scorer="", evidence=evidence, slices=[()] * count)

        promote, shown = [], []
        size_BN = np.ones_like(drawn.challenger[:, 0]) if drawn.size_BN is None else drawn.size_BN
        for challenger, champion, size_N, alpha in zip(
            drawn.challenger, drawn.champion, size_BN, alphas_B, strict=True
        ):
            sides = [measured(run, size_N) for run in challenger], [measured(run, size_N) for run in champion]
            verdict = compare_to_champion(
                sides[0][0],
                sides[1][0],
                self.rule,
                self.params,
                alpha=alpha,
                other_seeds=(sides[0][1:], sides[1][1:]),
            )
            promote.append(verdict.passed)
            p = 1 - verdict.numbers["share_above_min_gain"]
            shown.append(p <= alpha + 5e-5 and verdict.numbers["variant_gain"] > 0)
        return {"gate": np.array(promote), "gate, shown": np.array(shown)}


def errors_allowed(scenario: Scenario, size: int) -> list[float]:
    """Return the alpha of each of `size` decisions."""
    params = PromotionParams()
    if scenario.looks == 1:
        return [ALPHA / scenario.candidates] * size
    left = [share_left(params, refusals) for refusals in range(size + 1)]
    return [params.error_budget * (before - after) for before, after in itertools.pairwise(left)]


def simulate(name: str, comparisons: int, better_ones: int) -> dict[str, Any]:
    """Return the rates of one scenario in percent: false promotions, and power."""
    scenario, rng = SCENARIOS[name], np.random.default_rng([7, *name.encode()])
    critical, better = oracle(scenario, rng, comparisons)
    many = dataclasses.replace(scenario, items=20_000, clusters=1, cluster_noise=0.0, seeds=1)  # noise averages out
    # The deviation over seeds; skewed gains have none.
    equals = draw(many, rng, 0.0, BATCH, one_test=True).gains() if scenario.seed else np.zeros(1)
    deviation = float(equals.std()) / math.sqrt(2)
    judge = Judge(scenario, scenario.stated * deviation)
    batch = scenario.looks if scenario.looks > 1 else BATCH
    alphas = errors_allowed(scenario, batch)
    counts: dict[str, dict[str, float]] = {}
    repeated = scenario.looks > 1
    for by, kind, number in ((0.0, "false", comparisons), (better, "power", better_ones)):
        decisions: dict[str, list[NDArray[np.bool_]]] = {}
        for _ in range(number // batch):
            drawn = draw(scenario, rng, by, batch, one_test=repeated)
            decided = judge.others(drawn) | judge.gate(drawn, alphas if kind == "false" else [alphas[0]] * batch)
            decided["oracle"] = drawn.gains() > critical
            for method, promoted_B in decided.items():
                any_of_them = repeated and kind == "false"
                decisions.setdefault(method, []).append(np.array([promoted_B.any()]) if any_of_them else promoted_B)
        for method, parts in decisions.items():
            counts.setdefault(method, {})[kind] = round(100 * float(np.concatenate(parts).mean()), 2)
    return {
        "scenario": name,
        "about": scenario.about,
        "budget": 100 * (PromotionParams().error_budget if repeated else ALPHA),
        "comparisons": [comparisons, better_ones],
        "gain_in_points": round(float(draw(scenario, rng, better, 2000).gains().mean()), 2),
        "percent": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=10_000, help="between equals")
    parser.add_argument("--better", type=int, default=2_000, help="comparisons in which one is better")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process per scenario
    results = []
    with ProcessPoolExecutor(options.processes) as pool:
        counts = [options.comparisons] * len(options.scenarios), [options.better] * len(options.scenarios)
        for result in pool.map(simulate, options.scenarios, *counts):
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
