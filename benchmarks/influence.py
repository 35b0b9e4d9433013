"""How well `vlp influence` ranks training pairs: against retraining without groups of them, and by planted mistakes.

    python benchmarks/influence.py --work FOLDER              both tasks, three seeds: about 1.5 hours of a core
    python benchmarks/influence.py --work FOLDER --tasks captioning --seeds 1

2,000 synthetic scenes with one caption each, 200 of them swapped among each other; 200 val scenes. A TDEN of 128
dimensions is fine-tuned from new weights for 8 epochs, for captioning and for retrieval. Each training is a file in
FOLDER: an interrupted run continues. The table goes to benchmarks/results/influence.json; what is missing is "not run".

Retraining: the pairs are divided into 30 groups of equal size by the words of their captions (k-means, then cut), and
each seed trains once with all pairs and once without each group. A batch without the group's pairs is smaller, all else
is the same. A group's effect is the change of the mean loss on val, the mean over the seeds.

Methods, each by a group's mean score; of a single seed's model (the mean over seeds), and of the scores of all seeds
together:

- gradient     product of the gradients at the end of training
- tracin       the same, summed over the checkpoints of all epochs with their learning rates (Pruthi et al. 2020)
- fisher       with the inverse diagonal of the Fisher matrix
- mirrored     how much a pair's loss falls after 60 small steps on val (Ko et al. 2024): `vlp influence`
- loss         the pair's own loss, negated

Contrasts, written on 2026-12-01 after trials of these methods with other groups, and before any run of this script:
Spearman's correlation with the effects is at least 0.5, with a 95% interval by resampling groups (10,000 times); of the
swapped captions at least 80% are among the tenth with the lowest scores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from influence_methods import directional_derivatives, fisher_diagonal, mean_gradient, precondition
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.stats import spearmanr

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.mismatch import reduce_texts
from vlp_models.contrib.influence.losses import pair_losses
from vlp_models.contrib.influence.scores import LR, all_losses, moved_weights
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.models import build_model
from vlp_models.params import OptimizerParams, load_params, to_plain
from vlp_models.pipeline.prepared_data import PreparedData
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel, read_options
from vlp_models.training.optim import build_optimizer, build_scheduler

ROOT = Path(__file__).parents[1]
PAIRS, SWAPPED, VAL, GROUPS, EPOCHS, SEEDS = 2000, 200, 200, 30, 8, (1, 2, 3)
RATE = 1e-3
STAGES = ("generate scenes", "prepare scenes", "validate", "detector", "features", "tokenizer", "shards")
SETTINGS = (
    f"generate.scenes={{train: {PAIRS}, val: {VAL}, test: 1, questions_per_image: 0}}",
    "detector.steps=150",
    "tokenizer.min_frequency=1",
    "tracking.uri=",
)
CONFIG: dict[str, Any] = {"hidden": 128, "heads": 4, "intermediate": 256, "init_std": 0.08, "feature_dropout": 0.3}
CONFIG |= dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
OPTIONS: dict[str, dict[str, Any]] = {"captioning": {}, "retrieval": {"loss": "contrastive", "temperature": 0.05}}
BATCH = {"captioning": 64, "retrieval": 200}


class Data:
    """The scenes of FOLDER: pairs with swapped captions, val pairs, and the groups."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder)
        if not (self.workspace.shards / "manifest.json").exists():
            self._make()
        self.prepared = PreparedData.load(self.workspace)
        pairs = self._read("train")
        chosen = random.Random(1).sample(range(len(pairs)), SWAPPED)
        texts = [pair.text for pair in pairs]
        for place, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            texts[place] = pairs[other].text
        self.pairs = [dataclasses.replace(pair, text=text) for pair, text in zip(pairs, texts, strict=True)]
        self.swapped = np.isin(np.arange(len(pairs)), chosen)
        self.val = self._read("val")
        # pairs by cluster, cut into groups of equal size
        _, cluster_P = kmeans2(reduce_texts(texts)[:, :16].astype(float), GROUPS, seed=1, minit="++")
        order = np.argsort(cluster_P, kind="stable")
        self.group_P = np.empty(len(pairs), int)
        self.group_P[order] = np.arange(len(pairs)) * GROUPS // len(pairs)

    def _make(self) -> None:
        root = self.workspace.root
        shutil.copy(ROOT / "params.yaml", root / "params.yaml")
        apply_overlay(root / "params.yaml", None, list(SETTINGS))
        params = load_params(root / "params.yaml")
        for stage in STAGES:
            name, _, key = stage.partition(" ")
            importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, self.workspace, key)

    def _read(self, split: str) -> list[Sample]:
        """Return the first caption of each scene."""
        dataset = ShardDataset(self.workspace.shards, split, "captions", regions=True)
        return list({sample.image_id: sample for sample in (dataset[i] for i in range(len(dataset)))}.values())


def make_task(data: Data, name: str, seed: int) -> TaskModel:
    torch.manual_seed(seed)
    model = build_model("tden", CONFIG, data.prepared.facts)
    task = task_class(name)
    options = to_plain(read_options(task, OPTIONS[name]))
    described: dict[str, Any] = {
        "family": "tden",
        "name": "tden",
        "max_text_len": 24,
        "max_regions": 16,
        "blank_images": False,
    }
    info = data.prepared.describe(model, task=name, options=options, **described)
    return task(model, data.prepared.tokenizer, info)


def train(data: Data, name: str, seed: int, without: NDArray[np.bool_], keep: list[dict[str, Any]] | None) -> TaskModel:
    """Fine-tune without some pairs, whose places in the batches stay empty; append each epoch's weights to `keep`."""
    task, size = make_task(data, name, seed), BATCH[name]
    steps = math.ceil(len(data.pairs) / size)
    params = OptimizerParams(lr=RATE, muon_lr=3e-3, betas=[0.9, 0.98], warmup_fraction=0.1)
    optimizer = build_optimizer(task, params)
    scheduler = build_scheduler(optimizer, steps * EPOCHS, params)
    for epoch in range(EPOCHS):
        task.train()
        order = np.random.default_rng([seed, epoch]).permutation(len(data.pairs))
        for step in range(steps):
            chosen = [data.pairs[i] for i in order[step * size : (step + 1) * size] if not without[i]]
            torch.manual_seed(seed * 1_000_003 + epoch * steps + step)  # of dropout, whatever is left out
            task.loss(task.collate(chosen), generator=torch.Generator().manual_seed(step)).mean.backward()
            torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if keep is not None:
            rate = scheduler.get_last_lr()[0]
            keep.append({"lr": rate, "weights": {k: v.clone() for k, v in task.state_dict().items()}})
    return task.eval()


def batches(task: TaskModel, samples: Sequence[Sample], size: int = 100) -> list[Batch]:
    return [task.collate(samples[start : start + size]) for start in range(0, len(samples), size)]


def losses(task: TaskModel, samples: Sequence[Sample]) -> NDArray[np.float64]:
    return all_losses(task, batches(task, samples), pair_losses)


def score(data: Data, name: str, seed: int) -> dict[str, list[float]]:
    """Return method -> the score of each pair, by the models of one seed."""
    epochs: list[dict[str, Any]] = []
    task = train(data, name, seed, np.zeros(len(data.pairs), bool), epochs)
    pairs, val = batches(task, data.pairs), batches(task, data.val)
    found = {"loss": -losses(task, data.pairs)}
    query = mean_gradient(task, val, pair_losses)
    found["gradient"] = directional_derivatives(task, lambda: pairs, query, pair_losses)
    fisher = fisher_diagonal(task, batches(task, data.pairs, 4), pair_losses)
    found["fisher"] = directional_derivatives(task, lambda: pairs, precondition(query, fisher), pair_losses)
    found["tracin"] = np.zeros(len(data.pairs))
    for epoch in epochs:
        task.load_state_dict(epoch["weights"])
        query = mean_gradient(task, val, pair_losses)
        found["tracin"] += epoch["lr"] * directional_derivatives(task, lambda: pairs, query, pair_losses)
    # the last epoch's weights are those of the end of training
    order = np.random.default_rng(seed).permutation(len(data.val))
    mixed = batches(task, [data.val[i] for i in order], 64)
    with moved_weights(task, lambda: mixed, pair_losses, lr=LR * RATE):
        found["mirrored"] = -found["loss"] - losses(task, data.pairs)
    return {method: values.tolist() for method, values in found.items()}


def correlate(effects: NDArray[np.float64], scores: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return Spearman's correlation over the groups, with a 95% interval by resampling them."""
    rng = np.random.default_rng(1)
    drawn = [rng.integers(len(effects), size=len(effects)) for _ in range(10_000)]
    low, high = np.nanquantile([spearmanr(effects[d], scores[d]).statistic for d in drawn], (0.025, 0.975))
    return float(spearmanr(effects, scores).statistic), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the data and the trainings")
    parser.add_argument("--tasks", nargs="+", choices=tuple(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(options.work)
    data = Data(Path.cwd())
    runs = {name: {seed: run_seed(data, name, seed) for seed in options.seeds} for name in options.tasks}
    record: dict[str, Any] = {"pairs": PAIRS, "swapped": SWAPPED, "groups": GROUPS}
    record |= {"tasks": {name: compare(data, runs[name]) if name in runs else "not run" for name in OPTIONS}}
    print(json.dumps(record, indent=2))
    if set(options.tasks) == set(OPTIONS) and set(options.seeds) == set(SEEDS):
        write_result("influence", record)


def run_seed(data: Data, name: str, seed: int) -> dict[str, Any]:
    """Return the scores of a seed and the effects of its groups; what a file in FOLDER has is not run again."""
    file = Path("runs") / f"{name}-{seed}.json"
    run: dict[str, Any] = read_json_or_none(file) or {"val": {}}
    if "scores" not in run:
        run["scores"] = score(data, name, seed)
        write_json(file, run)
    for group in (-1, *range(GROUPS)):  # -1: nothing is left out
        if str(group) not in run["val"]:
            task = train(data, name, seed, data.group_P == group, None)
            run["val"][str(group)] = float(losses(task, data.val).mean())
            write_json(file, run)
            print(f"{name}, seed {seed}, without group {group}: {run['val'][str(group)]:.3f}", flush=True)
    return run


def compare(data: Data, runs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return, of each method, the correlation with the groups' effects and the share of swapped captions found."""
    effects = [[run["val"][str(group)] - run["val"]["-1"] for group in range(GROUPS)] for run in runs.values()]
    effect_G = np.mean(effects, axis=0)
    agreements = [spearmanr(effects[a], effects[b]).statistic for a in range(len(runs)) for b in range(a)]
    table: dict[str, Any] = {}
    for method in next(iter(runs.values()))["scores"]:
        of_seeds = [np.array(run["scores"][method]) for run in runs.values()]
        together = np.sum([scores / np.abs(scores).mean() for scores in of_seeds], axis=0)
        single = [spearmanr(effect_G, group_means(data, scores)).statistic for scores in of_seeds]
        rho, low, high = correlate(effect_G, group_means(data, together))
        table[method] = {
            "correlation of one seed": float(np.mean(single)),
            "correlation": rho,
            "interval": [low, high],
            "swapped in the lowest tenth, of one seed": float(np.mean([share_found(data, s) for s in of_seeds])),
            "swapped in the lowest tenth": share_found(data, together),
        }
    agreement = float(np.mean(agreements)) if agreements else None
    return {"seeds": [*runs], "correlation of the effects of two seeds": agreement, "methods": table}


def group_means(data: Data, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([scores[data.group_P == group].mean() for group in range(GROUPS)])


def share_found(data: Data, scores: NDArray[np.float64]) -> float:
    lowest = np.argsort(scores, kind="stable")[: len(scores) // 10]
    return float(data.swapped[lowest].sum() / data.swapped.sum())


if __name__ == "__main__":
    main()
