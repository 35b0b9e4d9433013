"""The preset few-pairs on a draw of Flickr8k's training photos, scored on 300 of its dev photos.

python benchmarks/few_pairs.py FLICKR8K 50 --draw 1      (needs requirements-photographs.lock; some minutes on one core)

Writes benchmarks/results/few_pairs-PHOTOS-DRAW.json: the metrics of CIDEr, each with its interval and baselines.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from common import write_result

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params

ROOT = Path(__file__).parents[1]
STAGES = (
    *("prepare pairs", "validate", "detector", "features", "tokenizer", "shards"),
    *("initial tden", "finetune tden-captioning", "evaluate tden-captioning"),
)
SETTINGS = ["tracking.uri=", "validate.max_bad_fraction=0.2", "evaluate.splits=[test]"]


def write_pairs(flickr8k: Path, pairs: Path, photos: int, draw: int) -> None:
    """Write pairs.csv: `photos` of train, and of dev always the same 40 for val and 300 for test."""
    pairs.mkdir(parents=True)
    (pairs / "Images").symlink_to(flickr8k.absolute() / "Images")
    captions: dict[str, list[str]] = {}
    with (flickr8k / "captions.txt").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], []).append(row["caption"])

    def shuffled(name: str, seed: int) -> list[str]:
        listed = (flickr8k / f"Flickr_8k.{name}Images.txt").read_text().split()
        found = sorted(photo for photo in listed if photo in captions and (flickr8k / "Images" / photo).exists())
        random.Random(seed).shuffle(found)
        return found

    dev = shuffled("dev", 0)
    splits = {"train": shuffled("train", draw)[:photos], "val": dev[:40], "test": dev[40:340]}
    with (pairs / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for split, own in splits.items():
            writer.writerows([f"Images/{p}", text, split] for p in own for text in dict.fromkeys(captions[p]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flickr8k", type=Path, help="folder with Images, captions.txt and the official lists")
    parser.add_argument("photos", type=int)
    parser.add_argument("--draw", type=int, default=1)
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_pairs(options.flickr8k, root / "data" / "raw" / "pairs", options.photos, options.draw)
        os.chdir(root)
        shutil.copy(ROOT / "params.yaml", root)
        apply_overlay(root / "params.yaml", ROOT / "vlp_models" / "presets" / "few-pairs.yaml", SETTINGS)
        params, workspace = load_params(root / "params.yaml"), Workspace(root)
        for stage in STAGES:
            name, _, key = stage.partition(" ")
            importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, workspace, key)
        scores = [
            {key: score[key] for key in ("metric", "value", "low", "high", "baselines", "n")}
            for score in read_json(workspace.evaluation("tden-captioning") / "scores.json")
            if score["metric"].startswith("CIDEr")
        ]
    about = {"photos": options.photos, "draw": options.draw, "seconds": round(time.perf_counter() - start)}
    print(write_result(f"few_pairs-{options.photos}-{options.draw}", about | {"scores": scores}))


if __name__ == "__main__":
    main()
