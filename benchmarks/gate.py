"""What the gate says of the same model trained again, and of a better one: simulated weeks, decided by its own code.

    python benchmarks/gate.py --weeks 100 --out benchmarks/results/gate.json

Every week two designs are trained from fresh seeds and answer the same test; promotion/gate.py decides as `vlp promote`
would, with the shipped params. Answers are drawn item by item. An answer is right where a sum is above zero: how easy
the image is, how easy the question is, how good the design is, how lucky its seed is, and what this seed happens to
make of this question. The last two are set so that

- two seeds of a design disagree on `DISAGREE` of the questions (an assumption; it moves noise between items and seeds),
- the accuracy of a design deviates over seeds as that of TDEN does on VQA in benchmarks/results/study-tden.json: over
  300 images with six questions each, pooled over its designs, twelve seeds each.

The results say what was drawn, on seeds made for that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from vlp_models.metrics.score import Evidence, FloatArray, mean_percent
from vlp_models.params import GateParams, PromotionParams, load_params
from vlp_models.registry.promotion.gate import Measurement, compare_to_champion, spend_budget

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "benchmarks" / "results" / "study-tden.json"
QUESTIONS, STUDY_IMAGES = 6, 300
ACCURACY = 48.0  # percent; that of the study's designs
OF_IMAGE = 0.3  # of the variance of how easy a question is
DISAGREE = 0.25
BETTER = 3.0  # points


@dataclass(frozen=True, kw_only=True)
class World:
    """own: deviation of what a seed makes of one question; seed: of its luck; both in deviations of the easiness."""

    own: float
    seed: float

    @property
    def points(self) -> float:
        """Of accuracy, for one unit of goodness."""
        return 100 * float(norm.pdf(norm.ppf(ACCURACY / 100))) / math.sqrt(1 + self.own**2)

    @property
    def goodness(self) -> float:
        return float(norm.ppf(ACCURACY / 100)) * math.sqrt(1 + self.own**2)


def world_like(deviation: float) -> World:
    """In which a design's accuracy on the study's test deviates so much over seeds."""
    low, high = 0.0, 5.0
    for _ in range(60):  # two seeds disagree the more, the larger a seed's own part is
        own = (low + high) / 2
        low, high = (own, high) if _disagreement(own) < DISAGREE else (low, own)
    of_items = 100**2 * DISAGREE / 2 / (STUDY_IMAGES * QUESTIONS)
    world = World(own=own, seed=0.0)
    return World(own=own, seed=math.sqrt(deviation**2 - of_items) / world.points)


def _disagreement(own: float) -> float:
    """Of two seeds: twice the mean of p (1 - p) over questions, by Gauss-Hermite."""
    points, weights = np.polynomial.hermite_e.hermegauss(101)
    goodness = norm.ppf(ACCURACY / 100) * math.sqrt(1 + own**2)
    p = norm.cdf((points + goodness) / max(own, 1e-9))
    return float(2 * (weights * p * (1 - p)).sum() / weights.sum())


class Test:
    """Some images with questions; what runs answer is right or wrong."""

    def __init__(self, world: World, images: int, rng: np.random.Generator) -> None:
        self.world, self.images, self._rng = world, images, rng
        of_image = np.repeat(rng.normal(0, math.sqrt(OF_IMAGE), images), QUESTIONS)
        self._easy = of_image + rng.normal(0, math.sqrt(1 - OF_IMAGE), images * QUESTIONS)
        self._images = [f"{i:06d}" for i in range(images)]

    def run(self, better: float = 0.0) -> Measurement:
        """A seed of a design that is `better` by so many points."""
        world, rng = self.world, self._rng
        good = world.goodness + better / world.points + rng.normal(0, world.seed)
        self.right = self._easy + good + rng.normal(0, world.own, len(self._easy)) > 0
        # An image's questions are resampled together: their sum is all that the gate makes of them.
        right: FloatArray = self.right.reshape(-1, QUESTIONS).sum(axis=1).astype(np.float64)
        parts = np.column_stack([right, np.full(self.images, QUESTIONS, dtype=np.float64)])
        evidence = Evidence(groups=self._images, parts_NK=parts, statistic=mean_percent, items=self._images)
        return Measurement(metric="accuracy", test="t", scorer="", evidence=evidence, slices=[()] * self.images)


def decide(
    test: Test, better: float, seeds: int, rule: GateParams, params: PromotionParams, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """A week: the champion's design, and one that is better, from so many fresh seeds each. Adds to the ledger."""
    week = len(entries)
    error = spend_budget(
        entries, params, model="m", test="t", versions=(week + 1, week), confidence=rule.confidence, choices=1
    ).error
    champions, challengers = ([test.run(by) for _ in range(seeds)] for by in (0.0, better))
    others = challengers[1:], champions[1:]
    found = compare_to_champion(challengers[0], champions[0], rule, params, error=error, other_seeds=others)
    entry = {"action": "refused", "model": "m", "version": week + 1, "from": week}
    entries.append({**entry, "decision": {"numbers": {"test": "t"}}})
    return {"outcome": found.outcome, "error": error, **found.numbers}


def simulate(world: World, images: int, seeds: int, better: float, weeks: int, *, one_test: bool, rng: Any) -> Any:
    """How often what was said. one_test: the same test decides every week; else each week has a fresh one."""
    params = load_params(ROOT / "params.yaml").promotion
    rule, said, entries = params.gate("vqa"), [], list[dict[str, Any]]()
    test = Test(world, images, rng)
    for _ in range(weeks):
        if not one_test:
            test, entries = Test(world, images, rng), []
        said.append(decide(test, better, seeds, rule, params, entries))
    outcomes = Counter(each["outcome"] for each in said)
    return {
        "images": images,
        "questions": images * QUESTIONS,
        "seeds": seeds,
        "better": better,
        "one_test": one_test,
        "weeks": weeks,
        "promote": outcomes["promote"],
        "keep": outcomes["keep"],
        "inconclusive": outcomes["inconclusive"],
        "detectable": round(statistics.median(each["detectable"] for each in said), 2),
        "error_first": said[0]["error"],
        "error_last": said[-1]["error"],
    }


def study_deviation() -> float:
    """Of VQA accuracy over seeds, pooled over the study's designs."""
    values: dict[str, list[float]] = {}
    for result in json.loads(STUDY.read_text(encoding="utf-8"))["results"]:
        values.setdefault(result["arm"], []).append(result["test"]["vqa"])
    return math.sqrt(statistics.mean(statistics.variance(own) for own in values.values()))


def check(world: World, seeds: int, rng: np.random.Generator) -> dict[str, float]:
    """What the drawn answers are like, on a test of the study's size."""
    test = Test(world, STUDY_IMAGES, rng)
    runs, right = [], []
    for _ in range(seeds):
        runs.append(test.run())
        right.append(test.right)
    disagree = [float(np.mean(a != b)) for a, b in itertools.pairwise(right)]
    return {
        "seeds": seeds,
        "accuracy": round(statistics.mean(run.value() for run in runs), 2),
        "deviation": round(statistics.stdev(run.value() for run in runs), 3),
        "disagree": round(statistics.mean(disagree), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=100)
    parser.add_argument("--images", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng, deviation = np.random.default_rng(1), study_deviation()
    world = world_like(deviation)
    results = {
        "about": {
            "study_deviation": round(deviation, 3),
            "seed_std_without_items": round(world.seed * world.points, 3),
            "assumed_disagreement": DISAGREE,
            "drawn": check(world, 400, rng),
        },
        "fresh_tests": [],
        "one_test": [],
    }
    print(json.dumps(results["about"]))
    for images in options.images:
        for seeds in options.seeds:
            for better in (0.0, BETTER):
                found = simulate(world, images, seeds, better, options.weeks, one_test=False, rng=rng)
                results["fresh_tests"].append(found)  # type: ignore[attr-defined]
                print(json.dumps(found), flush=True)
    for seeds in options.seeds[:2]:
        found = simulate(
            world, options.images[1 % len(options.images)], seeds, 0.0, options.weeks, one_test=True, rng=rng
        )
        results["one_test"].append(found)  # type: ignore[attr-defined]
        print(json.dumps(found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
