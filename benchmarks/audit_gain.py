"""What removing the pairs that `vlp audit` finds gains: CIDEr and R@1 of models trained with and without them.

    python benchmarks/audit_gain.py --root FLICKR8K --work FOLDER

Needs requirements-photographs.lock; FLICKR8K as for few_photos.py. Per seed, 2,000 training photos with one caption
each, a fifth of the captions swapped between photos, and three arms of the preset few-pairs with a retrieval run:

dirty     trained on all pairs
audited   trained without the pairs with a score above 0.5 (`validate.audit.above: 0.5`)
clean     trained without the swapped pairs: the most that removal can gain

Of dev always the same 40 photos are val and 300 are test, with five true captions. An arm is a project in FOLDER with a
result.json: an interrupted run continues, and finished arms are not run again. The projects stay, so that `vlp compare`
gives the gate's verdict on any two of them.

Contrasts, written on 2026-11-30 before any arm was run. Each is a mean over seeds 1 to 5 of paired differences with
Student's 95% interval; `supported` if the interval is above zero, `reversed` below, else `inconclusive`:

1. removal gains CIDEr: audited less dirty.
2. removal gains R@1 (text to image): audited less dirty.
3. perfect removal gains more CIDEr: clean less audited.
4. perfect removal gains more R@1: clean less audited.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import write_result
from few_photos import STAGES, TEST, VAL, list_photos, read_captions, run_stages, write_listing
from labeling import RETRIEVAL, RETRIEVAL_STAGES
from scipy import stats

from vlp_models.common.io import read_json, read_json_or_none, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.audit import audit
from vlp_models.params import load_params

SEEDS, PHOTOS, SHARE, ABOVE = (1, 2, 3, 4, 5), 2000, 0.2, 0.5
ARMS = ("dirty", "audited", "clean")
RUNS = {"CIDEr": "tden-captioning", "R@1": "tden-retrieval"}
CONTRASTS = {
    "removal gains CIDEr": ("audited", "dirty", "CIDEr"),
    "removal gains R@1": ("audited", "dirty", "R@1"),
    "perfect removal gains more CIDEr": ("clean", "audited", "CIDEr"),
    "perfect removal gains more R@1": ("clean", "audited", "R@1"),
}
SETTINGS = (*RETRIEVAL, "validate.max_bad_fraction=0.5")


def draw_pairs(flickr8k: Path, arm: str, seed: int, photos: int) -> dict[str, dict[str, Sequence[str]]]:
    """Return split -> photo -> captions of an arm."""
    captions = read_captions(flickr8k)
    names = list_photos(flickr8k, captions, "train", seed)[:photos]
    rng = random.Random(seed)
    train: dict[str, Sequence[str]] = {photo: [rng.choice(captions[photo])] for photo in names}
    chosen = rng.sample(names, round(SHARE * len(names)))
    if arm == "clean":
        train = {photo: texts for photo, texts in train.items() if photo not in chosen}
    else:
        train |= {photo: train[other] for photo, other in zip(chosen, chosen[1:] + chosen[:1], strict=True)}
    dev = list_photos(flickr8k, captions, "dev", 0)
    tested = {"val": dev[:VAL], "test": dev[VAL : VAL + TEST]}
    return {"train": train, **{split: {name: captions[name] for name in names} for split, names in tested.items()}}


def run_arm(flickr8k: Path, folder: Path, arm: str, seed: int, photos: int, settings: Sequence[str]) -> dict[str, Any]:
    """Train and evaluate an arm in its folder; return its scores on test and what the audit removed."""
    workspace = Workspace(folder)
    if not workspace.raw("pairs").exists():
        write_listing(flickr8k, workspace.raw("pairs"), draw_pairs(flickr8k, arm, seed, photos))
    before = Path.cwd()
    os.chdir(folder)
    try:
        settings = [*SETTINGS, *settings]
        if arm == "audited":
            run_stages(workspace, settings, STAGES[:4])
            audit(load_params(folder / "params.yaml"), workspace, ["pairs"], seed=seed, near_duplicates=False)
            settings = [*settings, f"validate.audit.above={ABOVE}"]
        run_stages(workspace, settings, (*STAGES, *RETRIEVAL_STAGES))
    finally:
        os.chdir(before)
    scores = {
        metric: next(
            score["value"]
            for score in read_json(workspace.evaluation(run) / "scores.json")
            if score["metric"] == metric and score["split"] == "test"
        )
        for metric, run in RUNS.items()
    }
    rules = read_json(workspace.reports / "validation.json")["rules"]
    removed = sum(rule["failed"] for rule in rules if rule["rule"] == "flagged")
    return {"arm": arm, "seed": seed, "removed": removed, **scores}


def compare(results: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each contrast: seeds, mean difference, interval and verdict."""
    rows = []
    for name, (arm, other, metric) in CONTRASTS.items():
        both = [seed for seed in SEEDS if (arm, seed) in results and (other, seed) in results]
        row: dict[str, Any] = {"contrast": name, "seeds": len(both), "verdict": "not run"}
        if len(both) == len(SEEDS):
            differences = [results[arm, seed][metric] - results[other, seed][metric] for seed in both]
            mean = statistics.fmean(differences)
            half = float(stats.t.ppf(0.975, len(both) - 1) * stats.sem(differences))
            verdict = "supported" if mean - half > 0 else "reversed" if mean + half < 0 else "inconclusive"
            row |= {"mean": mean, "low": mean - half, "high": mean + half, "verdict": verdict}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Flickr8k's folder")
    parser.add_argument("--work", type=Path, required=True, help="folder of the arms")
    parser.add_argument("--photos", type=int, default=PHOTOS, help="training photos; fewer only to try the script")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of params")
    options = parser.parse_args()
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in SEEDS:
        for arm in ARMS:
            folder = (options.work / f"seed-{seed}" / arm).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            result = read_json_or_none(folder / "result.json")
            if result is None:
                result = run_arm(options.root.absolute(), folder, arm, seed, options.photos, options.settings)
                write_json(folder / "result.json", result)
            results[arm, seed] = result
            print(result, flush=True)
    is_whole = options.photos == PHOTOS and not options.settings
    record = {"photos": options.photos, "arms": list(results.values()), "contrasts": compare(results)}
    if is_whole:
        write_result("audit_gain", record)
    print(record["contrasts"])


if __name__ == "__main__":
    main()
