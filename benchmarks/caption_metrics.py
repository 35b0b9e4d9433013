"""Correlation of the caption metrics with human judgments: Kendall's tau on Flickr8k's expert and crowd judgments.

    python benchmarks/caption_metrics.py --captions Flickr8k.token.txt \
        --expert ExpertAnnotations.txt --crowd CrowdFlowerAnnotations.txt
    python benchmarks/caption_metrics.py --captions captions.txt    # without judgments: only the known pairs below

The three files are in Flickr8k_text.zip. Writes benchmarks/results/caption_metrics.json. Everything down to `Rule` was
fixed before any judgment was read.

Protocol: M. Hodosh et al., "Framing Image Description as a Ranking Task" (2013), collected the judgments. How to score
them is as in P. Anderson et al., "SPICE" (2016), and J. Hessel et al., "CLIPScore" (2021), section 4.1 and appendix A,
whose tables have all published values:

- expert: three ratings from 1 to 4 of each caption. Each rating is an observation (they are not averaged), and tau-c is
  reported. Captions that are among the references of the image are left out: 158 of 5,822.
- crowd: the share of "yes" among at least three answers; tau-b is reported. A judged caption that is among the
  references of its image is kept and removed from that image's references.
- Every score is of one caption against the references of one image, and CIDEr's document frequencies count an image
  once per observation. All are the statistics that the evaluation aggregates, applied to single captions.

Intervals: 95%, bootstrap over images, as the judgments of one image share its references.

Contrasts: every metric minus CIDEr, on the experts' tau-c and on the crowd's tau-b, on the same resampled images. p is
corrected by Holm's method over all contrasts of both files. Verdict `higher` or `lower` if the interval excludes 0 and
the corrected p is below 5%, else `inconclusive`.

Rule: CIDEr stays the gate's metric, unless another metric is `higher` on one file and not `lower` on the other. If
several are, the one with the highest tau-c replaces it.

Known pairs: which of two captions describes the image? A caption written for it is compared with one written for
another image, and with itself after one word was replaced by one that no caption of the image has. The other captions
of the image are the references. This needs no judgments, and is no substitute for them: it has only clear cases, and a
caption of another image or a replaced word may be true by accident.

Shape suffixes: N observations, G images, S resamples, C distinct ratings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from common import RESULTS
from flickr8k_judgments import Captions, Judgments, read_captions, read_crowd, read_expert
from numpy.typing import NDArray

from vlp_models.contrib.compare.variants import holm
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import LEVELS, MIN_GROUPS, draws
from vlp_models.metrics.caption import CaptionSet, score_caption_sets
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import tokenize
from vlp_models.metrics.gain import LEVEL
from vlp_models.metrics.score import FloatArray

BASELINE = "CIDEr"
FIXED_CORPUS = "CIDEr-D, fixed corpus"  # the reward of self-critical training
CONTROLS = ("caption length", "other experts")  # neither is a metric, so neither is contrasted
VARIANTS: dict[str, Literal["b", "c"]] = {"expert": "c", "crowd": "b"}
RESAMPLES = 10_000
# Percent. CLIPScore's tables 1 and 2, which state tau-c for the experts and tau-b for the crowd; BLEU-1 of the crowd
# is from the README of aimagelab/pacscore, which has the other values, too, up to SPICE.
PUBLISHED = {
    "expert": {"BLEU-1": 32.3, "BLEU-4": 30.8, "ROUGE-L": 32.3, "METEOR": 41.8, "CIDEr": 43.9, "SPICE": 44.9},
    "crowd": {"BLEU-1": 17.9, "BLEU-4": 16.9, "ROUGE-L": 19.9, "METEOR": 22.2, "CIDEr": 24.6, "SPICE": 24.4},
}
# A word is replaced by another one of its group.
WORD_GROUPS = (
    ("man", "woman", "boy", "girl"),
    ("men", "women", "boys", "girls"),
    ("dog", "cat", "horse", "bird", "cow"),
    ("dogs", "cats", "horses", "birds", "cows"),
    ("black", "white", "red", "blue", "green", "yellow", "orange", "brown", "pink", "purple"),
    ("bike", "car", "motorcycle", "truck", "boat", "bus"),
    ("snow", "grass", "water", "sand", "mud"),
    ("shirt", "jacket", "hat", "dress", "coat", "sweater"),
    ("running", "jumping", "sitting", "standing", "swimming", "climbing", "sleeping"),
    ("two", "three", "four", "five"),
)
GROUP_OF = {word: group for group in WORD_GROUPS for word in group}

ItemScores = dict[str, FloatArray]  # metric -> score of each candidate [N]


# --- scores of single captions


def score_each(
    sets: Mapping[str, CaptionSet], captions: Captions
) -> tuple[dict[str, dict[str, FloatArray]], list[str]]:
    """Return set -> metric -> score of each candidate [N], and notes on metrics that were not computed or differ.

    Args:
        captions: corpus of the document frequencies of `FIXED_CORPUS`.
    """
    results: dict[str, ItemScores] = {}
    notes: list[str] = []
    for name, scores in score_caption_sets(sets, lambda text: print(text, file=sys.stderr)).items():
        set_scores = results.setdefault(name, {})
        for score in scores:
            if score.note and f"{score.metric}: {score.note}" not in notes:
                notes.append(f"{score.metric}: {score.note}")
            if score.evidence is not None:  # the statistic of one item's parts is the item's own score
                set_scores[score.metric] = score.evidence.statistic(score.evidence.parts_NK)
    texts = {text for s in sets.values() for text in s.candidates.values()}
    tokens, _ = tokenize([*texts, *(text for image_captions in captions.values() for text in image_captions.values())])
    corpus = DocumentFrequencies.count(
        [tokens[t].split() for t in image_captions.values()] for image_captions in captions.values()
    )
    reward = CiderD(corpus, lambda key: [tokens[text].split() for text in key.split("\n")])  # key: all references
    for name, s in sets.items():
        results[name][FIXED_CORPUS] = np.array(
            [10 * reward.score("\n".join(s.references[i]), [tokens[s.candidates[i]].split()])[0] for i in s.candidates]
        )
        results[name][CONTROLS[0]] = np.array([len(tokens[text].split()) for text in s.candidates.values()], np.float64)
    return results, notes


# --- Kendall's tau of resampled images


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCounts:
    """Pairs of observations, counted by their two images, so that a resample of images is a quadratic form.

    balance_GG  concordant minus discordant ordered pairs
    tied_GG     ordered pairs of equal score, each observation with itself included
    ratings_GC  observations of each rating
    level_N     rank of the score among the distinct scores
    image_N     position of the image
    """

    balance_GG: FloatArray
    tied_GG: FloatArray
    ratings_GC: FloatArray
    level_N: NDArray[np.int64]
    image_N: NDArray[np.int64]

    @classmethod
    def count(cls, scores_N: FloatArray, ratings_N: FloatArray, image_N: NDArray[np.int64]) -> PairCounts:
        """image_N: from 0 to G - 1, each at least once."""
        order = np.argsort(image_N, kind="stable")
        image_N = image_N[order]
        score_N = np.unique(scores_N[order], return_inverse=True)[1].astype(np.int32)
        rating_N = np.unique(ratings_N[order], return_inverse=True)[1].astype(np.int32)
        starts_G = np.searchsorted(image_N, np.arange(image_N[-1] + 1))
        ends_G = np.append(starts_G[1:], len(image_N))
        balance, tied = [], []
        for start, end in zip(starts_G, ends_G, strict=True):
            above = _signs(score_N[start:end], score_N)  # (observations of this image, N)
            concordant_N = (above * _signs(rating_N[start:end], rating_N)).sum(0, dtype=np.int32)
            balance.append(np.add.reduceat(concordant_N, starts_G))
            tied.append(np.add.reduceat((above == 0).sum(0, dtype=np.int32), starts_G))
        ratings_GC = np.zeros((len(starts_G), rating_N.max() + 1))
        np.add.at(ratings_GC, (image_N, rating_N), 1)
        return cls(
            balance_GG=np.array(balance, np.float64),
            tied_GG=np.array(tied, np.float64),
            ratings_GC=ratings_GC,
            level_N=score_N.astype(np.int64),
            image_N=image_N,
        )

    def tau(self, counts_SG: FloatArray, variant: Literal["b", "c"]) -> FloatArray:
        """Return tau in percent if image g occurs counts_SG[s, g] times; 0 if all scores or all ratings are equal."""
        ratings_SC = counts_SG @ self.ratings_GC
        n_S = ratings_SC.sum(1)
        balance_S = _quadratic(counts_SG, self.balance_GG) / 2
        if variant == "b":
            pairs_S = n_S * (n_S - 1) / 2
            tied_scores_S = (_quadratic(counts_SG, self.tied_GG) - n_S) / 2
            tied_ratings_S = ((ratings_SC**2).sum(1) - n_S) / 2
            scale_S = np.sqrt(np.maximum(0, pairs_S - tied_scores_S) * np.maximum(0, pairs_S - tied_ratings_S))
        else:
            classes_S = np.minimum((ratings_SC > 0).sum(1), self._distinct_scores(counts_SG))
            scale_S = n_S**2 * (classes_S - 1) / classes_S / 2
        return 100 * np.divide(balance_S, scale_S, out=np.zeros_like(balance_S), where=scale_S > 0)

    def _distinct_scores(self, counts_SG: FloatArray) -> FloatArray:
        levels = self.level_N.max() + 1
        distinct = [
            np.count_nonzero(np.bincount(self.level_N, counts_G[self.image_N], levels)) for counts_G in counts_SG
        ]
        return np.array(distinct, np.float64)


def _signs(values: NDArray[np.int32], others: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return the sign of each difference [own, others]."""
    return (values[:, None] > others).view(np.int8) - (values[:, None] < others).view(np.int8)


def _quadratic(counts_SG: FloatArray, matrix_GG: FloatArray) -> FloatArray:
    result: FloatArray = ((counts_SG @ matrix_GG) * counts_SG).sum(1)
    return result


# --- intervals and contrasts


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """A statistic in percent, and its values on resampled images."""

    value: float
    draws_S: FloatArray

    def interval(self) -> tuple[float, float]:
        low, high = np.percentile(self.draws_S, LEVELS)
        return float(low), float(high)


def bootstrap(
    statistics: Mapping[str, Callable[[FloatArray], FloatArray]], groups: int, resamples: int
) -> dict[str, Estimate]:
    """Evaluate functions of counts [S, G] on the images themselves and on resamples, the same ones for all."""
    drawn: dict[str, list[FloatArray]] = {name: [] for name in statistics}
    for counts_SG in draws(groups, resamples, np.random.default_rng(0)):
        for name, statistic in statistics.items():
            drawn[name].append(statistic(counts_SG))
    once = np.ones((1, groups))
    return {
        name: Estimate(value=float(statistic(once)[0]), draws_S=np.concatenate(drawn[name]))
        for name, statistic in statistics.items()
    }


def contrast_all(families: Mapping[str, Mapping[str, Estimate]], groups: int) -> list[dict[str, Any]]:
    """Compare each metric with CIDEr in each family; p is corrected over all of them.

    Args:
        groups: number of images of the smallest family; with fewer than `MIN_GROUPS`, all verdicts are inconclusive.
    """
    rows: list[dict[str, Any]] = []
    for family, estimates in families.items():
        base = estimates[BASELINE]
        for name, estimate in estimates.items():
            if name == BASELINE or name in CONTROLS:
                continue
            gap = Estimate(value=estimate.value - base.value, draws_S=estimate.draws_S - base.draws_S)
            smaller = min(int((gap.draws_S <= 0).sum()), int((gap.draws_S >= 0).sum()))
            low, high = gap.interval()
            p = min(1.0, 2 * (smaller + 1) / (len(gap.draws_S) + 1))
            rows.append({"set": family, "metric": name, "minus": BASELINE, "difference": gap.value, "low": low})
            rows[-1] |= {"high": high, "p": p}
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        shown = groups >= MIN_GROUPS and not row["low"] <= 0 <= row["high"] and p < 1 - LEVEL
        row["p_holm"] = p
        row["verdict"] = ("higher" if row["difference"] > 0 else "lower") if shown else "inconclusive"
    return rows


def choose_metric(contrasts: Sequence[Mapping[str, Any]], expert: Mapping[str, Estimate]) -> str:
    """Apply the rule of this module's docstring."""
    verdicts: dict[str, set[str]] = {}
    for row in contrasts:
        verdicts.setdefault(row["metric"], set()).add(row["verdict"])
    better = [name for name, directions in verdicts.items() if "higher" in directions and "lower" not in directions]
    return max(better, key=lambda name: expert[name].value, default=BASELINE)


def correlate(judgments: Judgments, scores: Mapping[str, FloatArray], resamples: int) -> dict[str, dict[str, Estimate]]:
    """Return variant of tau -> metric -> estimate."""
    names, image_N = np.unique(np.asarray(judgments.images, dtype=object).astype(str), return_inverse=True)
    pairs = {}
    for name, own_N in scores.items():
        print(f"pairs: {name}", file=sys.stderr)
        pairs[name] = PairCounts.count(own_N, judgments.ratings_N, image_N)
    estimates: dict[str, dict[str, Estimate]] = {}
    for variant in ("b", "c"):
        statistics = {name: partial(counted.tau, variant=variant) for name, counted in pairs.items()}
        estimates[variant] = bootstrap(statistics, len(names), resamples)
    return estimates


def judge_metrics(
    judgments: Mapping[str, Judgments], captions: Captions, resamples: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the correlations of each file, the contrasts and the metric that the rule chooses; and notes."""
    sets = {}
    for name, file_judgments in judgments.items():
        ids = [str(n) for n in range(len(file_judgments.images))]
        candidates = dict(zip(ids, file_judgments.candidates, strict=True))
        references = {i: file_judgments.references[image] for i, image in zip(ids, file_judgments.images, strict=True)}
        sets[name] = CaptionSet(candidates=candidates, references=references)
    scores, notes = score_each(sets, captions)
    record: dict[str, Any] = {}
    families = {}
    for name, file_judgments in judgments.items():
        if file_judgments.other_experts_N is not None:
            scores[name][CONTROLS[1]] = file_judgments.other_experts_N
        estimates = correlate(file_judgments, scores[name], resamples)
        families[name] = estimates[VARIANTS[name]]
        rows = {
            metric: {f"tau_{variant}": _rounded(estimates[variant][metric]) for variant in estimates}
            | {"published": PUBLISHED[name].get(metric)}
            for metric in scores[name]
        }
        record[name] = {
            "observations": len(file_judgments.images),
            "images": len(file_judgments.references),
            "pairs_left_out": file_judgments.left_out,
            "reported": f"tau_{VARIANTS[name]}",
            "metrics": rows,
        }
    contrasts = contrast_all(families, min(len(file_judgments.references) for file_judgments in judgments.values()))
    record["contrasts"] = [_rounded_row(row) for row in contrasts]
    if len(judgments) == 2:
        record["chosen_by_the_rule"] = choose_metric(contrasts, families["expert"])
    return record, notes


# --- pairs with a known answer


@dataclass(frozen=True, kw_only=True)
class KnownPair:
    """A caption of an image and two that do not describe it; `replaced` is None without a word to replace."""

    described: str
    other: str
    replaced: str | None
    references: Sequence[str]


def draw_pairs(captions: Captions, seed: int = 0) -> dict[str, KnownPair]:
    """Draw a caption of each image that has at least two, and a caption of another image."""
    rng = random.Random(seed)
    images = [image for image, described in captions.items() if len(described) > 1]
    if len(images) < 2:
        raise DataError(f"{len(images)} images have two captions; the comparison needs at least two")
    pairs = {}
    for image in images:
        texts = list(captions[image].values())
        described = texts.pop(rng.randrange(len(texts)))
        other = image
        while other == image:
            other = rng.choice(images)
        replaced = replace_word(described, texts, rng)
        text = rng.choice(list(captions[other].values()))
        pairs[image] = KnownPair(described=described, other=text, replaced=replaced, references=texts)
    return pairs


def replace_word(caption: str, references: Sequence[str], rng: random.Random) -> str | None:
    """Replace one word by another of its group that neither the caption nor a reference has; None if there is no such
    word.
    """
    words = caption.split()
    used = {word for text in (caption, *references) for word in text.lower().split()}
    places = [
        (i, choices)
        for i, word in enumerate(words)
        if (choices := [w for w in GROUP_OF.get(word.lower(), ()) if w not in used])
    ]
    if not places:
        return None
    i, choices = rng.choice(places)
    return " ".join([*words[:i], rng.choice(choices), *words[i + 1 :]])


def compare_known_pairs(captions: Captions, resamples: int) -> tuple[dict[str, Any], list[str]]:
    """Return how often each metric prefers the caption that describes the image, a tie counting one half; and notes."""
    pairs = draw_pairs(captions)
    references = {image: pair.references for image, pair in pairs.items()}
    texts = {
        "own": {image: pair.described for image, pair in pairs.items()},
        "another image": {image: pair.other for image, pair in pairs.items()},
        "one word replaced": {image: pair.replaced or pair.described for image, pair in pairs.items()},
    }
    scores, notes = score_each(
        {name: CaptionSet(candidates=described, references=references) for name, described in texts.items()}, captions
    )
    chosen = {
        "another image": np.ones(len(pairs), dtype=bool),
        "one word replaced": np.array([pair.replaced is not None for pair in pairs.values()]),
    }
    record: dict[str, Any] = {}
    families = {}
    for name, counted_N in chosen.items():
        statistics = {
            metric: _accuracy_of(
                ((described_N > scores[name][metric]) + 0.5 * (described_N == scores[name][metric]))[counted_N]
            )
            for metric, described_N in scores["own"].items()
        }
        families[name] = bootstrap(statistics, int(counted_N.sum()), resamples)
        rows = {metric: _rounded(estimate) for metric, estimate in families[name].items()}
        record[name] = {"images": int(counted_N.sum()), "accuracy": rows}
    smallest = min(int(counted_N.sum()) for counted_N in chosen.values())
    record["contrasts"] = [_rounded_row(row) for row in contrast_all(families, smallest)]
    return record, notes


def _accuracy_of(right_G: FloatArray) -> Callable[[FloatArray], FloatArray]:
    return lambda counts_SG: 100 * (counts_SG @ right_G) / counts_SG.sum(1)


# --- report


def _rounded(estimate: Estimate) -> dict[str, float]:
    low, high = estimate.interval()
    return {"value": round(estimate.value, 2), "low": round(low, 2), "high": round(high, 2)}


def _rounded_row(row: Mapping[str, Any]) -> dict[str, Any]:
    digits = {"p": 5, "p_holm": 5}
    return {key: round(value, digits.get(key, 2)) if isinstance(value, float) else value for key, value in row.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=Path, required=True, help="Flickr8k.token.txt, or a CSV of image,caption")
    parser.add_argument("--expert", type=Path, help="ExpertAnnotations.txt")
    parser.add_argument("--crowd", type=Path, help="CrowdFlowerAnnotations.txt")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--out", type=Path, default=RESULTS / "caption_metrics.json")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        captions = read_captions(options.captions)
        readers = {"expert": (options.expert, read_expert), "crowd": (options.crowd, read_crowd)}
        judgments = {name: read(file, captions) for name, (file, read) in readers.items() if file}
        record: dict[str, Any] = {"resamples": options.resamples}
        record["judgments"], notes = (
            judge_metrics(judgments, captions, options.resamples) if judgments else ("not run: needs the files", [])
        )
        record["known_pairs"], more = compare_known_pairs(captions, options.resamples)
    except DataError as error:
        sys.exit(f"caption_metrics: {error}")
    record["notes"] = list(dict.fromkeys([*notes, *more]))
    record["seconds"] = round(time.perf_counter() - start)
    text = json.dumps(record, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
