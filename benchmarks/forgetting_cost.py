"""What exact forgetting costs and what cheaper forgetting costs in CIDEr: the frontier, on synthetic scenes.

    python benchmarks/forgetting_cost.py --work FOLDER              all rows: 5 seeds of each design
    python benchmarks/forgetting_cost.py --work FOLDER --seeds 1 2  only these

About 15 CPU minutes. Each row is a file in FOLDER: an interrupted run continues, and rows that exist are not run again.
Table and contrasts go to benchmarks/results/forgetting_cost.json; what is missing is "not run".

400 scenes may be withdrawn, 100 others (`public`) may not. Detector and vocabulary are made from the public ones, once,
and are the same in all designs. A design is a pretraining and fine-tunings on captions, each of a seed:

- undivided   pretraining for an epoch on all 500 scenes, then four epochs of fine-tuning on all: training as usual
- public      four epochs of both on the public scenes; uses no other
- joint N     public, then N epochs of fine-tuning on the 400
- parts N     public, then four epochs on each of N parts of the 400, whose weights are averaged (`parts: N`)
- scaled      parts 4, but twice as far from the start: `parts: {of: 4, scale: 2}`; of the same trained parts
- tail        public, three epochs on each of 4 parts, the average, then one epoch on all 400

The cost of forgetting is the training time that has to be repeated, as a share of the undivided training's: updates,
weighted by the median CPU time of an update of pretraining and of fine-tuning, expected for one random image and for 1%
of them (4 images, drawn without replacement).

Contrasts, written on 2026-11-30 before any row was run, after a trial of seed 11 with 1,000 and 250 scenes. Each is
a design's CIDEr, greedy, on the 300 test scenes less the undivided one's, by the paired test of the gate over scenes
and seeds 1 to 5, corrected for all of them. Expected: public is worse; parts lose more the more there are. Of their
own: parts 4 less joint 1, whose cost is about that of parts 4 for one image, scaled less parts 4, and tail less
parts 4. Added after seed 1 of the others: tail, and scaled, whose 2 had the highest CIDEr of 1, 1.5, 2 and 3 on the 40
val scenes with seed 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from math import comb
from pathlib import Path
from typing import Any

import yaml
from common import write_result
from few_photos import processor

from vlp_models.cli.presets import apply_overlay, find_preset
from vlp_models.common.io import read_json, read_json_or_none, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.compare.comparison import compare
from vlp_models.contrib.parts.plan import list_parts
from vlp_models.contrib.parts.train import run as train_part
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.params import Params, load_params

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3, 4, 5)
PRIVATE, PUBLIC, TEST = 400, 100, 300
WITHDRAWN = PRIVATE // 100
JOINT, PARTS = (1, 4), (4, 16)
DESIGNS = ("undivided", "public", *(f"joint-{n}" for n in JOINT), *(f"parts-{n}" for n in PARTS), "scaled", "tail")
DATA = (
    *("generate public", "generate scenes", "prepare public", "prepare scenes"),
    *("validate", "detector", "features", "tokenizer", "shards", "initial tden"),
)
SETTINGS = (
    f"generate.scenes={{train: {PRIVATE}, val: 40, test: {TEST}, questions_per_image: 0}}",
    f"generate.public={{train: {PUBLIC}, val: 10, questions_per_image: 0}}",
    "detector.steps=150",
    "tokenizer.min_frequency=1",
    "defaults.pretrain.cpu_processes=1",
    "tracking.uri=",
    "evaluate.splits=[test]",
    "evaluate.blind_baseline=[]",
    "evaluate.bootstrap=100",
    "evaluate.beam_size=1",
)


def make_params(root: Path) -> Params:
    """Write params.yaml with the runs of all designs and seeds, `DESIGN-seed-N`."""
    file = root / "params.yaml"
    shutil.copy(ROOT / "params.yaml", file)
    apply_overlay(file, find_preset("forget-cheaply"), list(SETTINGS))
    raw = yaml.safe_load(file.read_text())
    pretraining = raw["pretrain"].pop("tden")
    raw["finetune"] = {}
    for seed in SEEDS:
        common = {"task": "captioning", "evaluate_on": ["scenes"], "seed": seed, "max_epochs": 4}
        start = f"finetune/public-seed-{seed}"
        for name, sources, epochs in (("public", {"public": 1}, 4), ("undivided", {}, 1)):
            run = {**pretraining, "sources": sources, "max_epochs": epochs, "seed": seed}
            raw["pretrain"][f"{name}-seed-{seed}"] = run
            run = {**common, "start": f"pretrain/{name}-seed-{seed}", "sources": sources}
            raw["finetune"][f"{name}-seed-{seed}"] = run
        private = {**common, "start": start, "sources": {"scenes": 1}}
        for epochs in JOINT:
            raw["finetune"][f"joint-{epochs}-seed-{seed}"] = {**private, "max_epochs": epochs}
        for parts in PARTS:
            raw["finetune"][f"parts-{parts}-seed-{seed}"] = {**private, "parts": parts}
        raw["finetune"][f"scaled-seed-{seed}"] = {**private, "parts": {"of": 4, "scale": 2.0}}
        raw["finetune"][f"head-seed-{seed}"] = {**private, "parts": 4, "max_epochs": 3}
        tail = {"start": f"finetune/head-seed-{seed}", "max_epochs": 1}
        raw["finetune"][f"tail-seed-{seed}"] = {**private, **tail}
    # through JSON, since YAML would write an alias for a value in two places
    file.write_text(yaml.safe_dump(json.loads(json.dumps(raw)), sort_keys=False))
    return load_params(file)


def run_stage(params: Params, workspace: Workspace, stage: str) -> None:
    name, _, key = stage.partition(" ")
    importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, workspace, key)


def make_data(params: Params, workspace: Workspace) -> None:
    """Run the stages up to the initial model, once."""
    for stage in DATA:
        done = workspace.root / "rows" / f"{stage.replace(' ', '-')}.json"
        if not done.exists():
            run_stage(params, workspace, stage)
            write_json(done, {})


def train(params: Params, workspace: Workspace, name: str) -> dict[str, float]:
    """Train a run (`pretrain/RUN`, `finetune/RUN` or a part), unless its row exists; return updates and CPU seconds."""
    file = workspace.root / "rows" / f"{name.replace('/', '-')}.json"
    if not file.exists():
        kind, _, key = name.partition("/")
        start = time.process_time()
        if key.startswith("scaled") and "part" in key:  # the same training under another name
            same = f"finetune/{key.replace('scaled', 'parts-4')}"
            shutil.copytree(workspace.checkpoint(same), workspace.checkpoint(name))
            shutil.copy(workspace.training(same), workspace.training(name))
        elif key in list_parts(params):
            train_part(params, workspace, key)
        else:
            run_stage(params, workspace, f"{kind} {key}")
        seconds = round(time.process_time() - start, 2)
        write_json(file, {"updates": read_json(workspace.training(name))["steps"], "cpu_seconds": seconds})
    row: dict[str, float] = read_json(file)
    return row


def run_row(params: Params, workspace: Workspace, design: str, seed: int) -> None:
    """Train and evaluate a design with a seed; its row is written last."""
    name = f"{design}-seed-{seed}"
    file = workspace.root / "rows" / f"{name}.json"
    if file.exists():
        return
    for checkpoint in reversed(params.chain(f"finetune/{name}")[:-1]):
        for key, part in list_parts(params).items():
            if f"finetune/{part.run}" == checkpoint:
                train(params, workspace, f"finetune/{key}")
        train(params, workspace, checkpoint)
    run_stage(params, workspace, f"evaluate {name}")
    scores = read_json(workspace.evaluation(name) / "scores.json")
    row = {record["metric"]: record["value"] for record in scores if record["dataset"] == "scenes"}
    write_json(file, {"CIDEr": row["CIDEr"], "faithful captions": row.get("faithful captions")})


def list_trainings(params: Params, workspace: Workspace, design: str) -> dict[str, int]:
    """Return the trainings of a design with seed 1 that use images which may be withdrawn, and how many they use."""
    trainings: dict[str, Mapping[str, int]] = {}
    for checkpoint in params.chain(f"finetune/{design}-seed-1")[:-1]:
        kind, _, run = checkpoint.partition("/")
        parts = {
            f"finetune/{name}": part.params.sources for name, part in list_parts(params).items() if part.run == run
        }
        trainings |= parts or {checkpoint: getattr(params, kind)[run].sources}
    private = {name: sources for name, sources in trainings.items() if sources != {"public": 1}}
    # of a training on all datasets, the scenes alone: an image of `public` is not withdrawn
    return {
        name: len(ShardDataset(workspace.shards, "train", "images", sources or {"scenes": 1}))
        for name, sources in private.items()
    }


def read_costs(params: Params, workspace: Workspace) -> dict[str, Any]:
    """Return each design's updates, and its costs of forgetting one image and 1%, in percent of the undivided one."""
    rows = {path.stem: read_json(path) for path in (workspace.root / "rows").glob("*-seed-*.json")}
    per_update = {}
    for kind in ("pretrain", "finetune"):
        seconds = [
            r["cpu_seconds"] / r["updates"]
            for n, r in rows.items()
            if n.startswith(kind) and r["updates"] and "scaled" not in n
        ]
        per_update[kind] = statistics.median(seconds)
    costs: dict[str, dict[str, float]] = {}
    total = len(ShardDataset(workspace.shards, "train", "images", {"scenes": 1}))
    for design in DESIGNS:
        if f"{design}-seed-1" not in rows:
            continue
        cost = {"updates": 0.0, "one_image": 0.0, "one_percent": 0.0}
        for name, count in list_trainings(params, workspace, design).items():
            updates = rows[name.replace("/", "-")]["updates"]
            seconds = updates * per_update[name.partition("/")[0]]
            missed = comb(total - count, WITHDRAWN) / comb(total, WITHDRAWN)  # no withdrawn image is in it
            cost["updates"] += updates
            cost["one_image"] += seconds * count / total
            cost["one_percent"] += seconds * (1 - missed)
        costs[design] = cost
    whole = costs["undivided"]["one_image"]
    for cost in costs.values():
        cost |= {key: round(100 * cost[key] / whole, 1) for key in ("one_image", "one_percent")}
    return {"percent": costs, "seconds_per_update": {kind: round(value, 3) for kind, value in per_update.items()}}


def test_contrasts(workspace: Workspace, seeds: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return the gain of each design over its baseline, with the gate's test."""

    def files(design: str, common: list[int]) -> list[str | Path]:
        return [workspace.evaluation(f"{design}-seed-{seed}") for seed in common]

    contrasts: dict[str, Any] = {}
    of_their_own = (("joint-1", ("parts-4",)), ("parts-4", ("scaled", "tail")))
    for baseline, challengers in (("undivided", DESIGNS[1:]), *of_their_own):
        common = seeds[baseline]
        complete = [name for name in challengers if {*common} <= {*seeds[name]}]
        rows: dict[str, Any] = {}
        if complete and len(common) > 1:
            runs = {name: files(name, common) for name in (baseline, *complete)}
            for row in compare(runs, metrics=("CIDEr",)).rows:
                rows[row.challenger] = {
                    key: getattr(row, key) for key in ("gain", "low", "high", "p_corrected", "verdict", "items", "runs")
                }
        for name in challengers:
            contrasts[f"{name} - {baseline}"] = rows.get(name, "not run")
    return contrasts


def summarize(params: Params, workspace: Workspace) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for design in DESIGNS:
        for seed in SEEDS:
            row = read_json_or_none(workspace.root / "rows" / f"{design}-seed-{seed}.json")
            rows.setdefault(design, {})[str(seed)] = row or "not run"
    seeds = {name: [int(s) for s, row in by_seed.items() if row != "not run"] for name, by_seed in rows.items()}
    means = {
        name: round(statistics.mean(by_seed[str(s)]["CIDEr"] for s in seeds[name]), 1) if seeds[name] else "not run"
        for name, by_seed in rows.items()
    }
    return {
        "images": {"withdrawable": PRIVATE, "public": PUBLIC, "test": TEST, "withdrawn": WITHDRAWN},
        "costs": read_costs(params, workspace) if 1 in seeds["undivided"] else "not run",
        "CIDEr": means,
        "contrasts": test_contrasts(workspace, seeds),
        "rows": rows,
        "processor": processor(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the project and of the rows")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, choices=SEEDS, help="seeds to run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(options.work.absolute())
    os.chdir(workspace.root)
    params = make_params(workspace.root)
    make_data(params, workspace)
    # the last designs come last, so that an interrupted run has all seeds of the others first
    last = ("parts-16", "scaled", "tail")
    rows = [(design, seed) for seed in options.seeds for design in DESIGNS if design not in last]
    rows += [(design, seed) for design in last for seed in options.seeds]
    for design, seed in rows:
        run_row(params, workspace, design, seed)
        write_result("forgetting_cost", summarize(params, workspace))
    print(write_result("forgetting_cost", summarize(params, workspace)))


if __name__ == "__main__":
    main()
