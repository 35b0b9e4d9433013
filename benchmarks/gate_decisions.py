"""One scenario of benchmarks/gate.py: its oracle, and the decisions of all methods on draws of it.

Shape suffixes: B comparisons, R runs, N items, G groups (clusters of items), K additive statistics.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from gate_scenarios import SCENARIOS, Draws, Scenario, draw, true_gain
from numpy.typing import NDArray
from scipy import stats

from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.metrics.score import Evidence, FloatArray
from vlp_models.params import GateParams, PromotionParams
from vlp_models.registry.promotion.error_budget import share_left
from vlp_models.registry.promotion.gate import Measurement, compare_to_champion

ALPHA, POWER = 0.05, 0.8
ENDS = 0.025  # error at each end of the 95% interval
DRAWN = 200  # comparisons drawn at a time
CHECKED = 2  # comparisons of each draw that the gate's own function decides as well
RUNS = ("equal", "better", "detectable")
PARAMS = PromotionParams()


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
    scenario, rng = SCENARIOS[name], np.random.default_rng([seed, *name.encode(), RUNS.index(run), batch])
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
