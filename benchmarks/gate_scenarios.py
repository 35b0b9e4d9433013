"""Scenarios of benchmarks/gate.py: how the scores of two variants on one test are drawn.

Three families:

- Alike: scores are sums of effects, each normal: the ease of the item and of its cluster, the quality of the variant
  and its taste for an item, the seed, and the run's own noise on an item and on a cluster. An answer is right if the
  sum is above zero; a graded score is a function of it. Equally good variants have the same distribution.
- Unlike (`gains`): one variant wins a little on many items and loses much on few, or the other way round, so equally
  good variants differ. Their gains are drawn from a distribution of mean zero. Those of two recorded models are drawn
  from the recorded ones, less their mean.
- Corpus metrics (`corpus`): the recorded statistics of two models' captions or answers, which the metric combines over
  the whole test. On each item one of the two is the challenger's. "swapped": either one, with equal probability.
  "arranged": the better one where the two differ little, the worse one where they differ much, so that the metric is
  equal over all items.

Shape suffixes: B comparisons, R runs, N items, G groups (clusters of items), K additive statistics.
"""

from __future__ import annotations

import functools
import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from vlp_models.metrics.score import STATISTICS, FloatArray, Statistic

GAINS = Path(__file__).parent / "gains"
RUNS = Path(__file__).parents[1] / "docs/results/runs"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Stds are in those of an item's ease.

    items       of one test; of `gains` and `corpus`: groups
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
    gains       distribution of the gains of `_draw_gains`; with it, `noise` and `seed` are added to each run's scores
    corpus      metric and recorded models
    arranged    of `corpus`: the sides are arranged, not swapped
    sign        -1: the other variant's gains
    is_limit    no test can keep its error here
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
    corpus: str = ""
    arranged: bool = False
    sign: float = 1.0
    is_limit: bool = False

    @property
    def family(self) -> str:
        """Return one of the three families of the head of this file, or `limit`."""
        if self.is_limit:
            return "limit"
        return "corpus" if self.corpus else "unlike" if self.gains else "alike"

    @property
    def groups(self) -> int:
        """Return the number of groups of items, on average if their sizes are drawn."""
        if isinstance(self.clusters, int):
            return self.items // self.clusters
        return round(self.items / np.mean(self.clusters))

    @property
    def is_one_decision(self) -> bool:
        """Whether each comparison is one decision about one pair: an interval then has a true gain to cover."""
        return self.looks == self.candidates == 1


def _clustered(images: int) -> Scenario:
    return Scenario(
        about=f"{images} images, 10 questions each", items=10 * images, clusters=10, shared=0.3, cluster_noise=0.5
    )


def _seeds(about: str, seeds: int, stated: float = 0.0) -> Scenario:
    about = f"300 questions, {about}, deviation {'stated' if stated else 'estimated'}"
    return Scenario(about=about, seed=0.06, taste=0.4, seeds=seeds, stated=stated)


_ALIKE = {
    "binary": Scenario(about="300 questions, right or wrong"),
    "many items": Scenario(about="2,000 questions, right or wrong", items=2000),
    "few items": Scenario(about="25 questions, right or wrong", items=25),
    "graded": Scenario(about="300 scores between 0 and 1", kind="share"),
    "skewed": Scenario(about="300 scores as skewed as CIDEr per image", kind="skewed"),
    "few skewed": Scenario(about="25 scores as skewed as CIDEr per image", items=25, kind="skewed"),
    "ceiling": Scenario(about="300 questions, 98% right", accuracy=98.0),
    "high ceiling": Scenario(about="1,000 questions, 98% right", items=1000, accuracy=98.0),
    "steps": Scenario(about="300 answers scored in steps, 95% fully right", kind="steps", accuracy=95.0),
    "few steps": Scenario(about="50 answers scored in steps, 95% fully right", items=50, kind="steps", accuracy=95.0),
    "floor": Scenario(about="300 questions, 3% right", accuracy=3.0),
    **{f"clustered, {images}": _clustered(images) for images in (20, 25, 30, 50)},
    "clustered": _clustered(60),
    "uneven": Scenario(
        about="60 images, 1 to 20 questions", items=600, clusters=(1, 20), shared=0.3, cluster_noise=0.5
    ),
    "wilder": Scenario(about="300 graded scores, one variant varies twice as much", kind="share", wilder=2.0),
    "two seeds against one": Scenario(
        about="50 questions, 91% right, 2 seeds against 1", items=50, accuracy=91.0, seeds=2, champions=1
    ),
    "two seeds": _seeds("2 seeds each", 2),
    "three seeds": _seeds("3 seeds each", 3),
    "ten seeds": _seeds("10 seeds each", 10),
    "one seed, stated": _seeds("1 seed each", 1, stated=1.0),
    "two seeds, stated": _seeds("2 seeds each", 2, stated=1.0),
    "three seeds, stated": _seeds("3 seeds each", 3, stated=1.0),
    "repeated looks": Scenario(about="300 questions, 50 decisions on one test", looks=50),
    "best of five": Scenario(about="300 questions, the best of 5 on the test itself", candidates=5),
}
# Distribution of gains -> what it is, and the numbers of items: as it is, and with sides reversed.
_UNLIKE: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "exponential": ("many small wins, few large losses: 1 - exponential", (25, 50, 300, 2000), (50,)),
    "lognormal": ("many small wins, few very large losses: mean - lognormal", (50, 100, 300, 1000), (50,)),
    "rare": ("5% lose 0.95, the others win 0.05", (50, 300), (50,)),
    "rare ties": ("4% lose 1, 1.5% win 1, the others a little", (50, 300), (50,)),
    "size": ("of 1 to 20 items, larger ones lose", (20, 50, 100), (50,)),
    "pareto sizes": ("of Pareto sizes up to 100", (30, 50, 100), ()),
    "pareto losses": ("of Pareto sizes up to 20, larger ones lose", (50,), (50,)),
    "pope_f1.csv": ("POPE-style F1 of two public models", (50,), (50, 100, 300)),
    "scenes-tden-captioning - scenes-unified-vlp-captioning:CIDEr": (
        "CIDEr per image, TDEN and Unified VLP on scenes",
        (50,),
        (50,),
    ),
    "flickr8k-tden-captioning-scst - flickr8k-tden-captioning:CIDEr": (
        "CIDEr per photo of Flickr8k, TDEN with and without SCST",
        (100,),
        (100,),
    ),
    "scenes-xgpt-captioning - scenes-unified-vlp-captioning:faithful captions": (
        "faithful captions, XGPT and Unified VLP on scenes",
        (50,),
        (50,),
    ),
    "scenes-tden-entailment - scenes-vlmo-entailment:accuracy": (
        "entailment, TDEN and VLMo on scenes",
        (50, 300),
        (50,),
    ),
    "scenes-tden-vqa - scenes-vlmo-vqa:accuracy by image": ("of VQA questions, TDEN and VLMo on scenes", (50,), (50,)),
    "scenes-tden-retrieval - scenes-vlmo-retrieval:R@1 by image": (
        "of captions to retrieve, TDEN and VLMo on scenes",
        (50,),
        (50,),
    ),
    "nlvr - nlvr_text_only:accuracy by image": ("of NLVR statements, with images and without", (50,), (50,)),
}
# What no test of these few items can see.
_LIMITS = {
    "pareto tail": ("of Pareto sizes up to 100, larger ones lose", (50, 300), ()),
    "unseen": ("1 in 500 loses 50, the others win 0.1", (50, 300), ()),
}
_CLUSTERED = ("size", "pareto sizes", "pareto losses", "pareto tail")
_CORPUS = {
    "BLEU-4 of flickr8k-tden-captioning-scst - flickr8k-tden-captioning": "captions of Flickr8k, BLEU-4",
    "METEOR of scenes-xgpt-captioning - scenes-unified-vlp-captioning": "captions of scenes, METEOR",
    "macro F1 of scenes-tden-entailment - scenes-vlmo-entailment": "images with statements, macro F1",
}
SCENARIOS = _ALIKE | {
    f"{kind}, {'reversed, ' if sign < 0 else ''}{items}": Scenario(
        about=(
            f"{items:,} {'clusters' if kind in _CLUSTERED or kind.endswith('by image') else 'items'}"
            f"{' ' if about.startswith('of ') else ', '}{about}{' (reversed)' if sign < 0 else ''}"
        ),
        items=items,
        gains=kind,
        sign=sign,
        is_limit=kind in _LIMITS,
    )
    for kind, (about, forward, reverse) in (_UNLIKE | _LIMITS).items()
    for sign, sizes in ((1.0, forward), (-1.0, reverse))
    for items in sizes
}
SCENARIOS |= {
    f"exponential, {name} seeds": Scenario(
        about=f"100 items, 1 - exponential, 3 seeds each, deviation {name}",
        items=100,
        gains="exponential",
        noise=0.5,
        seed=0.05,
        seeds=3,
        stated=stated,
    )
    for name, stated in (("estimated", 0.0), ("stated", 1.0))
}
SCENARIOS |= {
    f"{corpus.split(' of ')[0]}, {how}": Scenario(
        about=f"100 {about}, sides {how}",
        items=100,
        corpus=corpus,
        arranged=how != "swapped",
        sign=-1.0 if "reversed" in how else 1.0,
    )
    for corpus, about in _CORPUS.items()
    for how in ("swapped", "arranged", "arranged (reversed)")
}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Additive statistics of a batch of comparisons, summed by group.

    challenger_BRGK, champion_BRGK   of each run
    item_gains   gain of each item [B, N], and of the first runs alone; None: the metric is not a mean over items
    is_binary    whether an item's score is 0 or 1
    """

    challenger_BRGK: FloatArray
    champion_BRGK: FloatArray
    statistic: Statistic
    item_gains: tuple[FloatArray, FloatArray] | None = None
    is_binary: bool = False

    def gains(self) -> FloatArray:
        """Return the gain of each comparison, in percent [B]."""

        def value(parts_BRGK: FloatArray) -> FloatArray:
            sums_BRK = parts_BRGK.sum(axis=2)
            values = self.statistic(sums_BRK.reshape(-1, sums_BRK.shape[2]))
            return np.asarray(values.reshape(sums_BRK.shape[:2]).mean(axis=1), dtype=np.float64)

        # Rounded, so that equal gains are equal.
        return np.round(value(self.challenger_BRGK) - value(self.champion_BRGK), 9)


def draw(scenario: Scenario, rng: np.random.Generator, better: float, size: int, *, one_test: bool = False) -> Draws:
    """Draw comparisons of a variant with another one.

    Args:
        better: by how much it is better: in units of quality, or of the gains; of a corpus metric: the share of the
            items with the worse side that get the better one.
        one_test: all comparisons are on the same items.
    """
    if scenario.corpus:
        return _draw_corpus(scenario, rng, better, size)
    if scenario.gains:
        return _draw_unlike(scenario, rng, better, size)
    return _draw_alike(scenario, rng, better, size, one_test)


# Alike: scores are sums of effects.


def _draw_alike(scenario: Scenario, rng: np.random.Generator, better: float, size: int, one_test: bool) -> Draws:
    cluster_N = _clusters(scenario, rng)
    count, items = int(cluster_N[-1]) + 1, len(cluster_N)
    tests = 1 if one_test else size
    ease_BN = rng.normal(0, math.sqrt(1 - scenario.shared), (tests, items))
    if scenario.shared:
        ease_BN += rng.normal(0, math.sqrt(scenario.shared), (tests, count))[:, cluster_N]
    spread = math.sqrt(1 + scenario.noise**2 + scenario.cluster_noise**2 + scenario.taste**2 + scenario.seed**2)
    quality = float(stats.norm.ppf(scenario.accuracy / 100)) * spread

    def side(by: float, runs: int, noise: float) -> FloatArray:
        sums = ease_BN[:, None] + quality + by + rng.normal(0, noise, (size, runs, items))
        if scenario.seed:
            sums += rng.normal(0, scenario.seed, (size, runs, 1))
        if scenario.taste:
            sums += rng.normal(0, scenario.taste, (size, 1, items))
        if scenario.cluster_noise:
            sums += rng.normal(0, scenario.cluster_noise, (size, runs, count))[:, :, cluster_N]
        return _score(scenario.kind, sums)

    challenger = side(better, scenario.seeds * scenario.candidates, scenario.noise * scenario.wilder)
    champion = side(0.0, scenario.champions or scenario.seeds, scenario.noise)
    if scenario.candidates > 1:
        best_B = challenger.mean(axis=2).argmax(axis=1)
        challenger = challenger[np.arange(size), best_B][:, None]
    starts_G = np.searchsorted(cluster_N, np.arange(count))
    sizes_G = np.bincount(cluster_N).astype(np.float64)
    return _means(challenger, champion, sizes_G, starts_G, is_binary=scenario.kind == "binary")


def _score(kind: str, sums: FloatArray) -> FloatArray:
    if kind == "binary":
        return (sums > 0).astype(np.float64)
    if kind == "steps":  # fully right above 0; what is nearly so counts in part
        return np.asarray(np.select([sums > 0, sums > -0.3, sums > -0.6], [1.0, 0.6, 0.3], 0.0))
    if kind == "share":  # linear, so noise leaves the mean as it is
        return 0.5 + 0.1 * sums
    return np.asarray(np.exp(0.6 * sums))  # a skewness of about 4


def _clusters(scenario: Scenario, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the number of each item's cluster [N], ascending."""
    if isinstance(scenario.clusters, int):
        return np.arange(scenario.items) // scenario.clusters
    low, high = scenario.clusters
    sizes = rng.integers(low, high + 1, size=scenario.items)
    return np.repeat(np.arange(scenario.items), sizes)[: scenario.items]


def _means(
    challenger: FloatArray, champion: FloatArray, sizes: FloatArray, starts_G: NDArray[np.intp], *, is_binary: bool
) -> Draws:
    """Return comparisons of mean scores [B, R, N]. sizes: of the groups, broadcast to [B, R, G]."""

    def parts(scores_BRN: FloatArray) -> FloatArray:
        sums_BRG = np.add.reduceat(scores_BRN, starts_G, axis=2)
        return np.stack([sums_BRG, np.broadcast_to(sizes, sums_BRG.shape)], axis=3)

    return Draws(
        challenger_BRGK=parts(challenger),
        champion_BRGK=parts(champion),
        statistic=STATISTICS["mean"],
        item_gains=(challenger.mean(axis=1) - champion.mean(axis=1), challenger[:, 0] - champion[:, 0]),
        is_binary=is_binary,
    )


# Unlike: gains are drawn.


def _draw_unlike(scenario: Scenario, rng: np.random.Generator, better: float, size: int) -> Draws:
    gain_BG, size_BG = _draw_gains(scenario.gains, rng, (size, scenario.items))
    # Sums over the items of each group: a group's gain counts for each of its items.
    gain_BG = scenario.sign * gain_BG + better
    # The champion's scores are such that both sides' are between 0 and 1 where the gain allows it.
    low_BG, high_BG = np.maximum(0, -gain_BG), np.minimum(1, 1 - gain_BG)
    champion_BG = low_BG + (high_BG - low_BG) * rng.random(gain_BG.shape)
    champion = (champion_BG * size_BG)[:, None]
    challenger = ((champion_BG + gain_BG) * size_BG)[:, None]
    if scenario.seeds > 1:
        shape = (size, scenario.seeds, scenario.items)
        challenger, champion = (
            side + rng.normal(0, scenario.noise, shape) + rng.normal(0, scenario.seed, (*shape[:2], 1))
            for side in (challenger, champion)
        )
    return _means(challenger, champion, size_BG[:, None], np.arange(scenario.items), is_binary=False)


def _draw_gains(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Return gains of mean zero and the number of items that each counts for [B, G]."""
    size_BG = np.ones(shape)
    if kind == "exponential":
        gain_BG = 1 - rng.exponential(size=shape)
    elif kind == "lognormal":
        gain_BG = math.exp(0.5) - rng.lognormal(0, 1, shape)
    elif kind == "rare":
        gain_BG = np.where(rng.random(shape) < 0.05, -0.95, 0.05)
    elif kind == "rare ties":  # 8 lost and 3 won of 200 right or wrong answers, less the mean
        gain_BG = rng.choice(np.repeat([-1.0, 1.0, 0.0], [8, 3, 189]) + 5 / 200, shape)
    elif kind == "size":  # larger clusters lose; the mean over items is zero
        size_BG = rng.integers(1, 21, shape).astype(np.float64)
        gain_BG = 0.1 * (41 / 3 - size_BG) + rng.normal(0, 0.5, shape)
    elif kind == "unseen":
        gain_BG = np.where(rng.random(shape) < 0.002, -49.9, 0.1)
    elif kind in ("pareto sizes", "pareto losses", "pareto tail"):
        largest = 20 if kind == "pareto losses" else 100
        size_BG = np.ceil(np.minimum(rng.pareto(1.5, shape) + 1, largest))
        gain_BG = rng.normal(0, 1, shape)
        if kind != "pareto sizes":
            gain_BG += _mean_log_size(largest) - np.log(size_BG)
    else:
        gain_G, counts_G = _recorded_gains(kind)
        chosen_BG = rng.integers(0, len(gain_G), shape)
        gain_BG, size_BG = gain_G[chosen_BG], counts_G[chosen_BG]
    return gain_BG, size_BG


@functools.cache
def _mean_log_size(largest: int) -> float:
    """Return the mean over items of the logarithm of the size of their cluster, for Pareto sizes."""
    sizes = np.arange(1.0, largest + 1)
    above = np.where(sizes < largest, sizes**-1.5, 0.0)  # probability of a cluster of more items
    probability = np.concatenate([[0.0], above[:-1] - above[1:]])  # of this size; 1 has none
    return float((probability * sizes * np.log(sizes)).sum() / (probability * sizes).sum())


@functools.cache
def _recorded_gains(name: str) -> tuple[FloatArray, FloatArray]:
    """Return the gain of one recorded model over another per item, less its mean, and the number of items.

    "first - second:metric"; "... by image": the means of each group of items.
    """
    if name.endswith(".csv"):
        gain_N = np.loadtxt(GAINS / name, skiprows=1)
        return gain_N - gain_N.mean(), np.ones(len(gain_N))
    bundles, metric = name.removesuffix(" by image").split(":")
    unit = "group" if name.endswith(" by image") else "item"
    first_GK, second_GK = _recorded_parts(bundles, metric, unit)[:2]
    gain_G, counts_G = first_GK[:, 0] - second_GK[:, 0], first_GK[:, 1]
    return gain_G / counts_G - gain_G.sum() / counts_G.sum(), counts_G


@functools.cache
def _recorded_parts(bundles: str, metric: str, unit: str) -> tuple[FloatArray, FloatArray, Statistic]:
    """Return the statistics of two run bundles of the documentation, summed by `unit`, and the metric's function."""
    sides = []
    for bundle in bundles.split(" - "):
        with zipfile.ZipFile(RUNS / f"{bundle}.run.zip") as archive:
            table = pd.read_parquet(io.BytesIO(archive.read("items.parquet")))
        rows = table[(table["metric"] == metric) & (table["split"] == "test")]
        names = rows["dataset"].astype(str) + " " + rows[unit].astype(str)
        parts = pd.DataFrame(np.stack(rows["parts"].tolist()), index=names)
        sides.append(parts.groupby(level=0).sum())
    first, second = (side.loc[sides[0].index.intersection(sides[1].index)].to_numpy() for side in sides)
    return first, second, STATISTICS.get(metric, STATISTICS["mean"])


# Corpus metrics: the sides are the statistics of two recorded models.


def _draw_corpus(scenario: Scenario, rng: np.random.Generator, better: float, size: int) -> Draws:
    better_GK, worse_GK, wins_G, statistic = _corpus(scenario.corpus, scenario.arranged, scenario.sign)
    chosen_BG = rng.integers(0, len(wins_G), (size, scenario.items))
    wins_BG1 = (rng.random(chosen_BG.shape) < wins_G[chosen_BG] + better * (1 - wins_G[chosen_BG]))[..., None]
    first_BGK, second_BGK = better_GK[chosen_BG], worse_GK[chosen_BG]
    return Draws(
        challenger_BRGK=np.where(wins_BG1, first_BGK, second_BGK)[:, None],
        champion_BRGK=np.where(wins_BG1, second_BGK, first_BGK)[:, None],
        statistic=statistic,
    )


@functools.cache
def _corpus(name: str, arranged: bool, sign: float) -> tuple[FloatArray, FloatArray, FloatArray, Statistic]:
    """Return of each group the better and the worse side's statistics, and the challenger's probability of the better.

    With these probabilities the metric is equal on both sides over all groups.
    """
    metric, bundles = name.split(" of ")
    first_GK, second_GK, statistic = _recorded_parts(bundles, metric, "group")
    # By how much the metric changes if a group's first side is replaced by the second one.
    total_1K = first_GK.sum(axis=0, keepdims=True)
    effect_G = statistic(total_1K) - statistic(total_1K - first_GK + second_GK)
    first_wins_G1 = (effect_G > 0)[:, None]
    better_GK = np.where(first_wins_G1, first_GK, second_GK)
    worse_GK = np.where(first_wins_G1, second_GK, first_GK)
    if not arranged:
        return better_GK, worse_GK, np.full(len(effect_G), 0.5), statistic
    rank_G = np.abs(effect_G).argsort().argsort()
    low, high = 0.0, float(len(rank_G))
    for _ in range(50):
        # Groups of a small effect, up to this rank, are won; one at the limit is won with some probability.
        wins_G = np.clip((low + high) / 2 - rank_G, 0, 1)
        gain = _gain_over_all(better_GK, worse_GK, wins_G, statistic)
        low, high = ((low + high) / 2, high) if gain < 0 else (low, (low + high) / 2)
    return better_GK, worse_GK, wins_G if sign > 0 else 1 - wins_G, statistic


def _gain_over_all(better_GK: FloatArray, worse_GK: FloatArray, wins_G: FloatArray, statistic: Statistic) -> float:
    wins_1G = wins_G[None]
    sides = wins_1G @ better_GK + (1 - wins_1G) @ worse_GK, wins_1G @ worse_GK + (1 - wins_1G) @ better_GK
    return float((statistic(sides[0]) - statistic(sides[1]))[0])


def true_gain(scenario: Scenario, better: float) -> float | None:
    """Return the gain over all items and seeds, in percent; None if it has no formula."""
    if scenario.corpus:
        better_GK, worse_GK, wins_G, statistic = _corpus(scenario.corpus, scenario.arranged, scenario.sign)
        return _gain_over_all(better_GK, worse_GK, wins_G + better * (1 - wins_G), statistic)
    return 100 * better if scenario.gains else None
