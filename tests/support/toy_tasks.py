"""Tasks on the toy dataset: make one, train it, predict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from toy_dataset import CLASSES, COLORS, FEATURE_DIM, Toy

from vlp_models.data.batch import Batch, Regions
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.params import to_plain
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel


def make(toy: Toy, task: str, **info: Any) -> TaskModel:
    model = toy.model(dropout=0.0, attention_dropout=0.0, hidden=32)
    facts: dict[str, Any] = {
        "family": "tden",
        "name": "tden",
        "model_config": to_plain(model.config),
        "task": task,
        "max_text_len": 12,
        "max_regions": 4,
        "detector_id": "toy",
        "feature_dim": FEATURE_DIM,
        "classes": tuple(CLASSES),
    }
    config = CheckpointInfo(**(facts | info))
    if task == "vqa":
        return task_class(task)(model, toy.tokenizer, config, labels=COLORS)
    return task_class(task)(model, toy.tokenizer, config)


def any_generator() -> torch.Generator:
    """Return a generator for losses that draw nothing, or whose draws do not matter."""
    return torch.Generator().manual_seed(1)


def learn(task_model: TaskModel, toy: Toy, steps: int, lr: float = 5e-3) -> float:
    """Train with AdamW on the whole training split; return the last loss."""
    dataset = ShardDataset(toy.shards, "train", task_model.view)
    batch = task_model.collate([dataset[i] for i in range(len(dataset))])
    optimizer = torch.optim.AdamW(task_model.parameters(), lr=lr)
    generator = any_generator()
    for _ in range(steps):
        loss = task_model.loss(batch, generator=generator).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def predict(task_model: TaskModel, toy: Toy, split: str) -> list[dict[str, Any]]:
    dataset = ShardDataset(toy.shards, split, task_model.prediction_view)
    samples = [dataset[i] for i in range(len(dataset))]
    return task_model.predict(task_model.collate(samples), samples)


def double(batch: Batch) -> Batch:
    """Return the batch with its regions in float64."""
    image = batch.image
    assert isinstance(image, Regions)
    return replace(
        batch, image=replace(image, features_BRF=image.features_BRF.double(), boxes_BR4=image.boxes_BR4.double())
    )
