"""Retrieval by embeddings: it learns to rank, its loss is the objective's, and edge cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from toy_dataset import Toy
from toy_tasks import any_generator, double, learn, make

from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import ParamsError
from vlp_models.tasks.base import TaskModel


def samples_of(toy: Toy, split: str, view: Any, count: int = 1000) -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, view)
    return [dataset[i] for i in range(min(count, len(dataset)))]


def ranked(task_model: TaskModel, samples: list[Sample]) -> list[dict[str, Any]]:
    return task_model.postprocess(task_model.predict(task_model.collate(samples), samples), samples)


def slow_loss(embed: np.ndarray, images: np.ndarray, ids: list[str], margin: float, hardest: bool) -> float:
    total = 0.0
    for a, b in ((embed, images), (images, embed)):
        costs = [
            [max(0.0, margin + float(a[i] @ b[j]) - float(a[i] @ b[i])) for j in range(len(ids)) if ids[j] != ids[i]]
            for i in range(len(ids))
        ]
        violations = [cost for row in costs for cost in row if cost > 0]
        total += sum(map(max, costs)) / len(ids) if hardest else sum(violations) / max(1, len(violations))
    return total


@pytest.mark.parametrize("options", [{}, {"negatives": "hardest", "margin": 0.5}, {"same_image_negatives": True}])
def test_loss_is_the_triplet_loss_of_the_embeddings(toy: Toy, options: dict[str, Any]) -> None:
    task_model = make(toy, "retrieval", options=options).double().eval()
    samples = samples_of(toy, "train", "captions", 6)
    samples[3] = replace(
        samples[3], image_id=samples[0].image_id, regions=samples[0].regions
    )  # one image, two captions
    batch = double(task_model.collate(samples))
    with torch.no_grad():
        texts = task_model.model.embed_text(batch.text).numpy()
        images = task_model.model.embed_image(batch.image).numpy()
    names = list(batch.sample_ids if "same_image_negatives" in options else batch.image_ids)
    expected = slow_loss(texts, images, names, options.get("margin", 0.2), "negatives" in options)
    assert task_model.loss(batch, generator=any_generator()).mean.item() == pytest.approx(expected, rel=1e-9)

    weight = task_model.model.text_pooler.project.weight
    loss = task_model.loss(batch, generator=any_generator()).mean
    (gradient,) = torch.autograd.grad(loss, weight)
    step = 1e-6
    for i, j in ((0, 0), (3, 5), (7, 1)):
        with torch.no_grad():
            weight[i, j] += step
            above = task_model.loss(batch, generator=any_generator()).mean.item()
            weight[i, j] -= 2 * step
            below = task_model.loss(batch, generator=any_generator()).mean.item()
            weight[i, j] += step
        assert gradient[i, j].item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-8)


def slow_contrast(texts: np.ndarray, images: np.ndarray, ids: list[str], temperature: float) -> float:
    total = 0.0
    for a, b in ((texts, images), (images, texts)):
        for i in range(len(ids)):
            candidates = [j for j in range(len(ids)) if j == i or ids[j] != ids[i]]
            weights = [np.exp(float(a[i] @ b[j]) / temperature) for j in candidates]
            total -= np.log(weights[candidates.index(i)] / sum(weights)) / 2
    return total / len(ids)


def test_contrastive_loss_with_a_given_temperature(toy: Toy) -> None:
    options = {"loss": "contrastive", "temperature": 0.1}
    task_model = make(toy, "retrieval", options=options).double().eval()
    samples = samples_of(toy, "train", "captions", 6)
    samples[3] = replace(samples[3], image_id=samples[0].image_id, regions=samples[0].regions)
    batch = double(task_model.collate(samples))
    with torch.no_grad():
        texts = task_model.model.embed_text(batch.text).numpy()
        images = task_model.model.embed_image(batch.image).numpy()
    loss = task_model.loss(batch, generator=any_generator())
    expected = slow_contrast(texts, images, list(batch.image_ids), 0.1)
    assert loss.mean.item() == pytest.approx(expected, rel=1e-9)
    assert "itc" in loss.parts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "contrastive"}, "no temperature of its own"),
        ({"temperature": 0.05}, r"set `options\.loss: contrastive`"),
        ({"scorer": "pairs", "loss": "contrastive"}, "it is pairs"),
        ({"scorer": "pairs", "loss": "contrastive", "temperature": 0.05}, "it is pairs"),
        ({"loss": "contrastive", "temperature": 0.0}, "from 0.001 to 10"),
    ],
)
def test_temperature_needs_the_contrastive_loss(toy: Toy, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        make(toy, "retrieval", options=options)


def test_learns_to_rank_the_right_image_and_text(toy: Toy) -> None:
    task_model = make(toy, "retrieval")
    before = ranked(task_model, samples_of(toy, "val", "images"))
    learn(task_model, toy, 80)
    rows = ranked(task_model, samples_of(toy, "val", "images"))
    captions = {row["image_id"]: row["captions"][0]["caption"] for row in rows}
    # The first result may be another image of the same shape and color.
    found_images = [captions[row["captions"][0]["top"][0][0]] == captions[row["image_id"]] for row in rows]
    found_texts = [row["top"][0][1] == captions[row["image_id"]] for row in rows]
    assert np.mean(found_images) >= 0.75 and np.mean(found_texts) >= 0.75
    assert np.mean([r["rank"] for r in rows]) < np.mean([r["rank"] for r in before])
    assert set(rows[0]) == {"image_id", "rank", "top", "captions"}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_batch_of_one_image_has_zero_loss(toy: Toy, batch_norm: bool) -> None:
    task_model = make(toy, "retrieval").train()
    if batch_norm:
        task_model.model = toy.model(pooler_batch_norm=True).train()
    next(task_model.parameters()).requires_grad_(False)  # parts may be frozen
    samples = samples_of(toy, "train", "captions", 1)
    for batch in (task_model.collate(samples), task_model.collate(samples * 2)):
        loss = task_model.loss(batch, generator=any_generator())
        loss.mean.backward()
        assert loss.mean.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in task_model.parameters())
    (row,) = ranked(task_model, samples_of(toy, "val", "images", 1))
    assert row["rank"] == row["captions"][0]["rank"] == 1


def test_each_dataset_is_ranked_separately(toy: Toy) -> None:
    task_model = make(toy, "retrieval")
    samples = samples_of(toy, "val", "images", 4)
    mixed = [replace(sample, source=name) for sample, name in zip(samples, "abab", strict=True)]
    rows = ranked(task_model, mixed)
    assert [row["image_id"] for row in rows] == [sample.image_id for sample in samples]
    assert {image for image, _ in rows[0]["captions"][0]["top"]} == {samples[0].image_id, samples[2].image_id}


def test_invalid_options_are_errors(toy: Toy) -> None:
    with pytest.raises(ParamsError, match=r"margin: 0\.0"):
        make(toy, "retrieval", options={"margin": 0})
    with pytest.raises(ParamsError, match="`tden` cannot embed images and texts separately or score image-text pairs"):
        task_model = make(toy, "retrieval")
        type(task_model)(torch.nn.Linear(1, 1), toy.tokenizer, task_model.info)
