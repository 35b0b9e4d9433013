"""Simulate weekly decisions of the gate on the same model trained again, and on a better one.

    python benchmarks/gate_weeks.py --weeks 100 --out benchmarks/results/gate_weeks.json

Every week two variants are trained from fresh seeds and answer the same test; registry/promotion/gate.py decides as
`vlp promote` would, with the shipped params. Answers are drawn item by item. An answer is right if a sum is above zero:
the ease of the image, the ease of the question, the quality of the variant, the effect of its seed, and this seed's own
effect on this question. The last two are set so that

- two seeds of a variant disagree on `DISAGREEMENT` of the questions (an assumption; it moves noise between items and
  seeds),
- the accuracy of a variant deviates over seeds as that of TDEN does on VQA in benchmarks/results/study-tden.json: over
  300 images with six questions each, pooled over its variants, twelve seeds each.

The results include a check of the drawn answers on separate seeds.
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
ACCURACY = 48.0  # percent; that of the study's variants
IMAGE_SHARE = 0.3  # of the variance of a question's ease that comes from its image
DISAGREEMENT = 0.25
BETTER = 3.0  # points


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The effect of a seed on one question (own) and on all questions (seed): stds, in stds of the questions' ease."""

    own: float
    seed: float

    @property
    def points(self) -> float:
        """Accuracy gained per unit of quality."""
        return 100 * float(norm.pdf(norm.ppf(ACCURACY / 100))) / math.sqrt(1 + self.own**2)

    @property
    def quality(self) -> float:
        return float(norm.ppf(ACCURACY / 100)) * math.sqrt(1 + self.own**2)


def fit_noise(std: float) -> Noise:
    """Return the noise that gives a variant's accuracy on the study's test this std over seeds."""
    low, high = 0.0, 5.0
    for _ in range(60):  # two seeds disagree more, the larger a seed's own effect is
        own = (low + high) / 2
        low, high = (own, high) if _disagreement(own) < DISAGREEMENT else (low, own)
    item_variance = 100**2 * DISAGREEMENT / 2 / (STUDY_IMAGES * QUESTIONS)
    noise = Noise(own=own, seed=0.0)
    return Noise(own=own, seed=math.sqrt(std**2 - item_variance) / noise.points)


def _disagreement(own: float) -> float:
    """Return how often two seeds disagree: twice the mean of p (1 - p) over questions, by Gauss-Hermite."""
    points, weights = np.polynomial.hermite_e.hermegauss(101)
    quality = norm.ppf(ACCURACY / 100) * math.sqrt(1 + own**2)
    p = norm.cdf((points + quality) / max(own, 1e-9))
    return float(2 * (weights * p * (1 - p)).sum() / weights.sum())


class Test:
    """Some images with questions that runs answer right or wrong."""

    def __init__(self, noise: Noise, images: int, rng: np.random.Generator) -> None:
        self.noise, self.images, self._rng = noise, images, rng
        image_ease = np.repeat(rng.normal(0, math.sqrt(IMAGE_SHARE), images), QUESTIONS)
        self._ease = image_ease + rng.normal(0, math.sqrt(1 - IMAGE_SHARE), images * QUESTIONS)
        self._images = [f"{i:06d}" for i in range(images)]

    def run(self, better: float = 0.0) -> Measurement:
        """Draw one seed of a variant that is `better` by that many points."""
        noise, rng = self.noise, self._rng
        quality = noise.quality + better / noise.points + rng.normal(0, noise.seed)
        self.right = self._ease + quality + rng.normal(0, noise.own, len(self._ease)) > 0
        # An image's questions are resampled together, so the gate uses only their sum.
        right: FloatArray = self.right.reshape(-1, QUESTIONS).sum(axis=1).astype(np.float64)
        parts = np.column_stack([right, np.full(self.images, QUESTIONS, dtype=np.float64)])
        evidence = Evidence(groups=self._images, parts_NK=parts, statistic=mean_percent, items=self._images)
        return Measurement(metric="accuracy", test="t", scorer="", evidence=evidence, slices=[()] * self.images)


def decide(
    test: Test, better: float, seeds: int, rule: GateParams, params: PromotionParams, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """Decide one week: the champion's variant vs a better one, each from fresh seeds. Appends to the ledger entries."""
    week = len(entries)
    contents = (f"version {week + 1}", f"version {week}")
    alpha = spend_budget(
        entries, params, model="m", test="t", contents=contents, confidence=rule.confidence, num_candidates=1
    ).alpha
    champions, challengers = ([test.run(by) for _ in range(seeds)] for by in (0.0, better))
    others = challengers[1:], champions[1:]
    found = compare_to_champion(challengers[0], champions[0], rule, params, alpha=alpha, other_seeds=others)
    entry = {"action": "refused", "model": "m", "content": contents[0], "from_content": contents[1]}
    entries.append({**entry, "decision": {"numbers": {"test": "t"}}})
    return {"outcome": found.outcome, "error": alpha, **found.numbers}


def simulate(noise: Noise, images: int, seeds: int, better: float, weeks: int, *, one_test: bool, rng: Any) -> Any:
    """Count the outcomes. one_test: the same test decides every week; otherwise each week has a fresh one."""
    params = load_params(ROOT / "params.yaml").promotion
    rule, decisions, entries = params.gate("vqa"), [], list[dict[str, Any]]()
    test = Test(noise, images, rng)
    for _ in range(weeks):
        if not one_test:
            test, entries = Test(noise, images, rng), []
        decisions.append(decide(test, better, seeds, rule, params, entries))
    outcomes = Counter(each["outcome"] for each in decisions)
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
        "detectable": round(statistics.median(each["detectable"] for each in decisions), 2),
        "error_first": decisions[0]["error"],
        "error_last": decisions[-1]["error"],
    }


def study_std() -> float:
    """Return the std of VQA accuracy over seeds, pooled over the study's variants."""
    values: dict[str, list[float]] = {}
    for result in json.loads(STUDY.read_text(encoding="utf-8"))["results"]:
        values.setdefault(result["arm"], []).append(result["test"]["vqa"])
    return math.sqrt(statistics.mean(statistics.variance(own) for own in values.values()))


def check(noise: Noise, seeds: int, rng: np.random.Generator) -> dict[str, float]:
    """Return accuracy, std and disagreement of the drawn answers on a test of the study's size."""
    test = Test(noise, STUDY_IMAGES, rng)
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
    rng, std = np.random.default_rng(1), study_std()
    noise = fit_noise(std)
    results = {
        "about": {
            "study_deviation": round(std, 3),
            "seed_std_without_items": round(noise.seed * noise.points, 3),
            "assumed_disagreement": DISAGREEMENT,
            "drawn": check(noise, 400, rng),
        },
        "fresh_tests": [],
        "one_test": [],
    }
    print(json.dumps(results["about"]))
    for images in options.images:
        for seeds in options.seeds:
            for better in (0.0, BETTER):
                found = simulate(noise, images, seeds, better, options.weeks, one_test=False, rng=rng)
                results["fresh_tests"].append(found)  # type: ignore[attr-defined]
                print(json.dumps(found), flush=True)
    for seeds in options.seeds[:2]:
        images = options.images[1 % len(options.images)]
        found = simulate(noise, images, seeds, 0.0, options.weeks, one_test=True, rng=rng)
        results["one_test"].append(found)  # type: ignore[attr-defined]
        print(json.dumps(found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
