"""The preset few-pairs on a draw of Flickr8k's training photos, scored on 300 of its dev photos.

    python benchmarks/few_photos.py --root FLICKR8K --photos 50 --draw 1

Needs requirements-photographs.lock. FLICKR8K has captions.txt, Images/ and the official lists of train and dev. Runs
the stages one after the other in a temporary folder and writes benchmarks/results/few_photos-50-draw-1.json. Of dev
always the same 40 photos are val and 300 are test; a draw is a seed that selects the training photos.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

from vlp_models.cli.presets import apply_overlay, find_preset
from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.errors import VLPError
from vlp_models.params import load_params
from vlp_models.tasks.captioning import NEAREST

ROOT = Path(__file__).parents[1]
RUN = "tden-captioning"
STAGES = (
    *("prepare pairs", "validate", "detector", "features", "tokenizer", "shards"),
    *("initial tden", f"finetune {RUN}", f"evaluate {RUN}"),
)
SETTINGS = ("tracking.uri=", "validate.max_bad_fraction=0.2", "evaluate.splits=[test]")
VAL, TEST, SAMPLES = 40, 300, 8


def read_captions(flickr8k: Path) -> dict[str, list[str]]:
    """Return photo -> its captions; one that a photo has twice is returned once."""
    captions: dict[str, dict[str, None]] = {}
    with (flickr8k / "captions.txt").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], {})[row["caption"]] = None
    return {photo: list(texts) for photo, texts in captions.items()}


def list_photos(flickr8k: Path, captions: Mapping[str, Sequence[str]], name: str, seed: int) -> list[str]:
    """Return the photos of an official list that exist and have captions, shuffled."""
    listed = (flickr8k / f"Flickr_8k.{name}Images.txt").read_text().split()
    photos = sorted(photo for photo in listed if photo in captions and (flickr8k / "Images" / photo).exists())
    random.Random(seed).shuffle(photos)
    return photos


def write_listing(flickr8k: Path, pairs: Path, rows: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Write pairs.csv next to a link to the photos. rows: split -> photo -> captions."""
    pairs.mkdir(parents=True)
    (pairs / "Images").symlink_to(flickr8k.absolute() / "Images")
    with (pairs / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for split, photos in rows.items():
            writer.writerows([f"Images/{photo}", text, split] for photo, texts in photos.items() for text in texts)


def write_pairs(flickr8k: Path, pairs: Path, photos: int, draw: int) -> None:
    """Write pairs.csv: `photos` of train, and of dev always the same ones for val and test."""
    captions = read_captions(flickr8k)
    train, dev = list_photos(flickr8k, captions, "train", draw), list_photos(flickr8k, captions, "dev", 0)
    if len(train) < photos or len(dev) < VAL + TEST:
        sys.exit(f"{flickr8k}: {len(train):,} train and {len(dev):,} dev photos with captions; needs {photos} and 340")
    splits = {"train": train[:photos], "val": dev[:VAL], "test": dev[VAL : VAL + TEST]}
    rows = {split: {photo: captions[photo] for photo in names} for split, names in splits.items()}
    write_listing(flickr8k, pairs, rows)


def run_stages(workspace: Workspace, settings: Sequence[str], stages: Sequence[str] = STAGES) -> dict[str, float]:
    """Apply the preset and run its stages; return the seconds of each."""
    shutil.copy(ROOT / "params.yaml", workspace.root)
    file = workspace.root / "params.yaml"
    apply_overlay(file, find_preset("few-pairs"), [*SETTINGS, *settings])
    params, seconds = load_params(file), {}
    for stage in stages:
        name, _, key = stage.partition(" ")
        start = time.perf_counter()
        importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, workspace, key)
        seconds[stage] = round(time.perf_counter() - start, 1)
    return seconds


def count_split(workspace: Workspace) -> dict[str, dict[str, int]]:
    """Return the images and captions of each split after validation, which removes near-duplicates from train."""
    split_of = {row["image_id"]: row["split"] for row in read_table("images", workspace.validated).to_pylist()}
    owners = read_table("captions", workspace.validated, ["image_id"])["image_id"].to_pylist()
    images, captions = Counter(split_of.values()), Counter(split_of[owner] for owner in owners)
    return {split: {"images": images[split], "captions": captions[split]} for split in ("train", "val", "test")}


def read_cider(workspace: Workspace) -> dict[str, Any]:
    """Return each CIDEr of scores.json with its interval, and the baselines of the plain one."""
    records = {record["metric"]: record for record in read_json(workspace.evaluation(RUN) / "scores.json")}
    chosen = {name: record for name, record in records.items() if name.startswith("CIDEr")}
    scores: dict[str, Any] = {
        name: {key: record[key] for key in ("value", "low", "high", "n")} for name, record in chosen.items()
    }
    baselines = records["CIDEr"]["baselines"]
    return scores | {"nearest_neighbor": baselines.get(NEAREST), "baselines": baselines}


def read_samples(workspace: Workspace) -> list[dict[str, Any]]:
    """Return some test photos, evenly spaced, each with its caption and its references."""
    lines = (workspace.evaluation(RUN) / "predictions-test.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(line) for line in lines[:: max(1, len(lines) // SAMPLES)][:SAMPLES]]
    captions = read_table("captions", workspace.validated, ["image_id", "text"]).to_pylist()
    return [
        {
            "image": row["image_id"].rpartition("/")[2],
            "caption": row["caption"],
            "references": [other["text"] for other in captions if other["image_id"] == row["image_id"]],
        }
        for row in chosen
    ]


def processor() -> str:
    """Return the name of the processor, and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Flickr8k's folder")
    parser.add_argument("--photos", type=int, required=True, help="training photos")
    parser.add_argument("--draw", type=int, default=1, help="seed of the draw")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of params")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/few_photos-...json")
    options = parser.parse_args()
    out = (options.out or RESULTS / f"few_photos-{options.photos}-draw-{options.draw}.json").absolute()
    flickr8k = options.root.absolute()
    if not (flickr8k / "captions.txt").is_file():
        sys.exit(f"{flickr8k}: no captions.txt; --root is Flickr8k's folder, with captions.txt, Images/ and the lists")
    with tempfile.TemporaryDirectory(prefix="few-photos-") as temporary:
        workspace = Workspace(Path(temporary))
        write_pairs(flickr8k, workspace.raw("pairs"), options.photos, options.draw)
        os.chdir(temporary)
        try:
            seconds = run_stages(workspace, options.settings)
        except VLPError as error:
            sys.exit(f"few_photos: {error}")
        record = {
            "photos": options.photos,
            "draw": options.draw,
            "settings": options.settings,
            "sizes": count_split(workspace),
            "scores": read_cider(workspace),
            "seconds": round(sum(seconds.values()), 1),
            "seconds_by_stage": seconds,
            "processor": processor(),
            "samples": read_samples(workspace),
        }
        os.chdir(ROOT)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
