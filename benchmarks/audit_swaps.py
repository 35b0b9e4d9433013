"""How well `vlp audit` finds swapped captions: Flickr8k's training photos, a share of the captions swapped.

    python benchmarks/audit_swaps.py --root FLICKR8K

Needs requirements-photographs.lock. FLICKR8K has captions.txt, Images/ and the official list of train. Three setups:

one     one caption a photo, drawn by the seed; captions are swapped between photos
five    all five captions; single captions are swapped
photo   all five captions; all captions of a photo are swapped with those of another photo

2%, 5% and 20% are swapped, with five seeds each. No weights were trained on images with texts: the photos' vectors come
from the CNN of the photo presets (EfficientNet-lite0, ImageNet), `--features grid` uses colors of 4 x 4 cells. The
vectors are kept in --work, and each run as a line of runs.jsonl there: the same command continues.

Writes benchmarks/results/audit.json (with `--features grid`: audit-grid.json): per setup and share the area under the
ROC curve, the precision among the first 1% of all pairs, and precision and recall of the pairs with a probability above
0.5; means over seeds, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result
from numpy.typing import NDArray
from PIL import Image

from vlp_models.common.progress import progress_bar
from vlp_models.contrib.audit.mismatch import find_mismatches
from vlp_models.vision.image_io import one_thread

SHARES = (0.02, 0.05, 0.20)
SEEDS = (1, 2, 3, 4, 5)
SETUPS = ("one", "five", "photo")
GOALS = {"auc": 0.9, "precision_first_percent": 0.8}


def read_captions(root: Path) -> dict[str, list[str]]:
    """Return photo -> captions of the training photos, in the order of the list."""
    captions: dict[str, list[str]] = {}
    with (root / "captions.txt").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], []).append(row["caption"])
    listed = (root / "Flickr_8k.trainImages.txt").read_text().split()
    return {photo: captions[photo] for photo in listed if photo in captions and (root / "Images" / photo).exists()}


def read_vectors(root: Path, photos: Sequence[str], features: str, work: Path) -> NDArray[np.float32]:
    """Return the mean of each photo's cells, [I, F]; computed once."""
    file = work / f"{features}.npy"
    if not file.exists():
        from vlp_models.params import TimmParams
        from vlp_models.vision.simple_regions import GridExtractor
        from vlp_models.vision.timm_backbone import CellExtractor, make_backbone

        extractor = (
            GridExtractor() if features == "grid" else CellExtractor(make_backbone(TimmParams(), root), max_regions=25)
        )
        vectors = []
        with one_thread(), progress_bar("reading photos", len(photos), "photos") as bar:
            for photo in photos:
                with Image.open(root / "Images" / photo) as image:
                    regions = extractor.extract([image.convert("RGB")])[0]
                vectors.append(regions.features.astype(np.float32).mean(0))
                bar.advance()
        np.save(file, np.stack(vectors))
    stored: NDArray[np.float32] = np.load(file)
    return stored


def swap(captions: Sequence[Sequence[str]], setup: str, share: float, seed: int) -> tuple[list[int], list[str], Any]:
    """Return the photo of each caption, the captions, and which of them are swapped."""
    rng = random.Random(seed)
    if setup == "one":
        captions = [[rng.choice(texts)] for texts in captions]
    owners = [photo for photo, texts in enumerate(captions) for _ in texts]
    # what is swapped: captions, or photos with all their captions
    units = len(captions) if setup == "photo" else len(owners)
    chosen = rng.sample(range(units), round(share * units))
    taken_from = dict(zip(chosen, chosen[1:] + chosen[:1], strict=True))  # one cycle: none keeps its own
    if setup == "photo":
        texts = [list(captions[taken_from.get(photo, photo)]) for photo in range(units)]
        owners = [photo for photo, group in enumerate(texts) for _ in group]
        return owners, [text for group in texts for text in group], np.isin(owners, chosen)
    plain = [text for group in captions for text in group]
    return owners, [plain[taken_from.get(row, row)] for row in range(units)], np.isin(range(units), chosen)


def measure(vectors: NDArray[np.float32], captions: Sequence[Sequence[str]], run: dict[str, Any]) -> dict[str, Any]:
    owners, texts, swapped = swap(captions, run["setup"], run["share"], run["seed"])
    start = time.perf_counter()
    mismatch = find_mismatches(vectors, np.array(owners), texts, seed=run["seed"])
    seconds = time.perf_counter() - start
    # the area under the curve: the share of (swapped, true) pairs of captions that are in the right order
    rank = mismatch.rank_P
    pairs = swapped.sum() * (~swapped).sum()
    before = np.cumsum(~swapped[np.argsort(rank)])[rank[swapped]].sum()
    first = rank < round(0.01 * len(rank))
    likely = mismatch.probability_P > 0.5
    return run | {
        "pairs": len(rank),
        "auc": float(1 - before / pairs),
        "precision_first_percent": float(swapped[first].mean()),
        "precision_likely": float(swapped[likely].mean()) if likely.any() else None,
        "recall_likely": float(likely[swapped].mean()),
        "estimated_share": mismatch.share,
        "seconds": round(seconds, 1),
    }


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for setup in SETUPS:
        for share in SHARES:
            group = [run for run in runs if (run["setup"], run["share"]) == (setup, share)]
            if not group:
                continue
            row: dict[str, Any] = {"setup": setup, "percent": round(100 * share), "pairs": group[0]["pairs"]}
            row["seeds"] = len(group)
            for name in ("auc", "precision_first_percent", "precision_likely", "recall_likely", "estimated_share"):
                values = [run[name] for run in group if run[name] is not None]
                row[name] = (
                    {"mean": float(np.mean(values)), "low": min(values), "high": max(values)} if values else None
                )
            row["seconds"] = float(np.median([run["seconds"] for run in group]))
            row["goals_met"] = all(row[name]["mean"] >= goal for name, goal in GOALS.items())
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Flickr8k's folder")
    parser.add_argument("--features", choices=("timm", "grid"), default="timm")
    parser.add_argument("--setup", choices=SETUPS, action="append", help="default: all")
    parser.add_argument("--work", type=Path, default=Path(".work/audit-benchmark"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    captions = read_captions(options.root)
    vectors = read_vectors(options.root, list(captions), options.features, options.work)
    ledger = options.work / f"{options.features}-runs.jsonl"
    runs = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    finished = {(run["setup"], run["share"], run["seed"]) for run in runs}
    for setup in options.setup or SETUPS:
        for share in SHARES:
            for seed in SEEDS:
                if (setup, share, seed) not in finished:
                    run = {"setup": setup, "share": share, "seed": seed}
                    runs.append(measure(vectors, list(captions.values()), run))
                    print(runs[-1], flush=True)
                    with ledger.open("a") as file:
                        file.write(json.dumps(runs[-1]) + "\n")
    record = {
        "data": f"Flickr8k, {len(captions):,} training photos",
        "features": options.features,
        "goals": GOALS,
        "rows": summarize(runs),
    }
    print(write_result("audit" if options.features == "timm" else f"audit-{options.features}", record))


if __name__ == "__main__":
    main()
