"""A fine-tuned model's predictions for a split: every sample exactly once, and once more with the image blanked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.inputs import blanked
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset, pooled, read_manifest
from vlp_models.errors import DataError, ParamsError
from vlp_models.tasks.base import TaskModel

Row = dict[str, Any]


def predict_all(
    model: TaskModel, dataset: ShardDataset, *, batch_size: int, blank_too: bool, description: str
) -> tuple[list[Row], list[Sample]]:
    """Predictions and samples (without their images), in the dataset's order.

    Args:
        blank_too: ask once more with every image blanked; what is said then stands under `<field>_blank`.

    Raises:
        ParamsError: the task has no such control.
        DataError: the model predicted for other samples than it was asked about.
    """
    import torch

    if blank_too and not model.blanked_fields:
        reason = model.why_not_blanked or "its predictions hold nothing to compare"
        raise ParamsError(f"params.yaml: `evaluate.blind_baseline`: {model.task} has none: {reason}")
    predictions: list[Row] = []
    samples: list[Sample] = []
    device = next(model.parameters()).device
    with torch.inference_mode():
        for chunk in _chunks(dataset, batch_size, description):
            chunk = [sample for sample in chunk if model.can_score(sample)]
            if not chunk:
                continue
            batch = model.collate(chunk).to(device)
            rows = model.predict(batch, chunk)
            if blank_too:
                blank = model.predict(blanked(batch), chunk)
                fields = model.blanked_fields
                rows = [row | {f"{f}_blank": b[f] for f in fields} for row, b in zip(rows, blank, strict=True)]
            predictions += rows
            samples += [sample.without_images() for sample in chunk]
        predictions = model.finish(predictions, samples) if samples else predictions
    predicted, expected = [row[model.id_key] for row in predictions], [sample.sample_id for sample in samples]
    if predicted != expected or len(set(predicted)) != len(predicted):
        raise DataError(
            f"{description}: {len(set(predicted))} ids predicted, {len(expected)} asked for; they must agree"
        )
    return predictions, samples


def _chunks(dataset: ShardDataset, size: int, description: str) -> Iterator[list[Sample]]:
    from rich.console import Console
    from rich.progress import track

    starts = range(0, len(dataset), max(1, size))
    console = Console(stderr=True)
    for start in track(starts, description, console=console, disable=not sys.stderr.isatty(), transient=True):
        yield [dataset[i] for i in range(start, min(start + max(1, size), len(dataset)))]


MOST = 200_000  # training images; of more, the search would take longer than the evaluation that it is for


def nearest(shards: Path, split: str, source: str, image_ids: Sequence[str], count: int = 30) -> dict[str, list[str]]:
    """Image id -> ids of training images of the same dataset that have a caption, nearest first; among equals the one
    that comes first in the shards. Nothing where the shards hold no regions, no such image, or more than `MOST`.

    Args:
        split: of the images asked for.
    """
    if not read_manifest(shards).feature_dim:
        return {}
    train = ShardDataset(shards, "train", "images", {source: 1}, captioned=True)
    if not 0 < len(train) <= MOST:
        return {}
    asked = ShardDataset(shards, split, "images", {source: 1})
    wanted, ids, known = set(image_ids), asked.image_ids(), train.image_ids()
    chosen = [number for number, image_id in enumerate(ids) if image_id in wanted]
    train_TF, asked_QF = pooled(train, range(len(train))), pooled(asked, chosen)
    found: dict[str, list[str]] = {}
    for number, feature_F in zip(chosen, asked_QF, strict=True):
        order = np.argsort(-(train_TF @ feature_F), kind="stable")[: count + 1]
        found[ids[number]] = [known[place] for place in order if known[place] != ids[number]][:count]
    return found
