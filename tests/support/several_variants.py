"""Runs of several variants and seeds in one params.yaml, with their scores per item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.metrics.score import item_scores, mean_score, write_items
from vlp_models.params import Params, parse_params, read_yaml

ROOT = Path(__file__).parents[2]
IMAGES = 80
# run -> (start, variant, seed, share of right answers)
RUNS = {
    "regions-1": ("pretrain/tden", "regions", 1, 0.80),
    "regions-2": ("pretrain/tden", "regions", 2, 0.82),
    "fresh-1": ("initial/tden", "fresh", 1, 0.40),
    "fresh-2": ("initial/tden", "fresh", 2, 0.41),
    "other": ("pretrain/second", "", 1, 0.81),
}


def variants_params() -> Params:
    raw = read_yaml(ROOT / "params.yaml")
    raw["models"]["small"] = {"family": "tden", "config": {"hidden": 16, "heads": 2}}
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "model": "small"}
    raw["finetune"] = {
        name: {"task": "vqa", "start": start, "variant": variant, "seed": seed}
        for name, (start, variant, seed, _) in RUNS.items()
    }
    raw["finetune"]["blind"] = {"task": "vqa", "start": "pretrain/tden", "blank_images": True}
    return parse_params(raw)


def write_evaluation(workspace: Workspace, run: str, share: float, seed: int, *, test: str = "t") -> None:
    """Write the scores of a run."""
    difficulty = np.random.default_rng(1).random(IMAGES)
    right = (difficulty + np.random.default_rng(seed + 10).normal(0, 0.05, IMAGES) < share).astype(float)
    names = [f"scenes/{i}" for i in range(IMAGES)]
    score = mean_score("accuracy", right, names, items=names)
    items = item_scores(score, dataset="scenes", split="test", test=test, slices={})
    assert items is not None and score.value is not None
    record: dict[str, Any] = {"dataset": "scenes", "split": "test", "metric": "accuracy", "value": score.value}
    record |= {"run": run, "task": "vqa", "model": "tden", "seed": seed, "low": 1.0, "high": 99.0, "n": IMAGES}
    record |= {"baselines": {"majority answer": 30.0}, "note": "", "seconds": 1.0, "peak_memory_mb": 9.0}
    record |= {"git": "abc", "data": "def", "family": "tden", "variant": "x", "leakage": None}
    folder = workspace.evaluation(run)
    folder.mkdir(parents=True)
    write_json(folder / "scores.json", [record])
    write_items(folder / "items.parquet", [items])


def variants_workspace(folder: Path) -> Workspace:
    made = Workspace(folder)
    for run, (_, _, seed, share) in RUNS.items():
        write_evaluation(made, run, share, seed)
        training = {"parameters": 1000, "samples": 500, "seconds": 10.0, "peak_memory_mb": 300.0}
        write_json(made.training(f"finetune/{run}"), training)
    write_evaluation(made, "blind", 0.3, 5)
    write_evaluation(made, "gone", 0.99, 1)  # a run that params.yaml no longer has
    pretraining = {"parameters": 900, "samples": 7000, "seconds": 60.5, "peak_memory_mb": 800.0}
    write_json(made.training("pretrain/tden"), pretraining)
    return made
