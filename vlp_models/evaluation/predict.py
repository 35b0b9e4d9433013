"""Predictions of a fine-tuned model for a split, and the training images nearest to those of a split.

Shape suffixes: Q query images, T training images, F feature dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlp_models.common.progress import progress_bar
from vlp_models.data.inputs import blanked
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset, mean_region_features, read_manifest
from vlp_models.errors import DataError, ParamsError
from vlp_models.tasks.base import TaskModel

Row = dict[str, Any]
MAX_TRAIN_IMAGES = 200_000  # with more, the nearest-neighbor search would take longer than the evaluation


def predict_all(
    model: TaskModel, dataset: ShardDataset, *, batch_size: int, with_blind: bool, description: str
) -> tuple[list[Row], list[Sample]]:
    """Predict every sample that can be scored, once; return predictions and samples (without images) in order.

    Args:
        with_blind: predict again with every image blanked; the task's `blind_fields` are stored as `<field>_blind`.

    Raises:
        ParamsError: the task has no blind baseline.
        DataError: the ids of the predictions are not those of the samples.
    """
    if with_blind and not model.blind_fields:
        reason = model.why_no_blind or "its predictions have no field to compare"
        raise ParamsError(f"params.yaml: `evaluate.blind_baseline`: {model.task} has no blind baseline: {reason}")
    predictions: list[Row] = []
    samples: list[Sample] = []
    device = next(model.parameters()).device
    batch_size = max(1, batch_size)
    with torch.inference_mode(), progress_bar(description, len(dataset), "samples") as progress:
        for start in range(0, len(dataset), batch_size):
            chunk = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
            progress.advance(by=len(chunk))
            # A sample without references is read but not scored.
            chunk = [sample for sample in chunk if model.can_score(sample)]
            if not chunk:
                continue
            batch = model.collate(chunk).to(device)
            rows = model.predict(batch, chunk)
            if with_blind:
                # The same batch with every image blanked; a row gets the blind prediction next to its own.
                for row, blind_row in zip(rows, model.predict(blanked(batch), chunk), strict=True):
                    row.update({f"{name}_blind": blind_row[name] for name in model.blind_fields})
            predictions += rows
            # The samples are kept for scoring, which needs no pixels or regions: memory stays small.
            samples += [sample.without_images() for sample in chunk]
        predictions = model.postprocess(predictions, samples) if samples else predictions
    # The caller pairs both lists by position.
    predicted, expected = [row[model.id_key] for row in predictions], [sample.sample_id for sample in samples]
    if predicted != expected or len(set(predicted)) != len(predicted):
        raise DataError(
            f"{description}: predictions for {len(set(predicted))} different ids, but {len(expected)} samples; the ids "
            "must be the same, in the same order"
        )
    return predictions, samples


class NearestTrainImages:
    """Finds similar training images by the cosine of mean region features. The training images are read once."""

    def __init__(self, shards: Path, source: str) -> None:
        """source: of the query images; the training images are captioned ones of the same dataset."""
        self._shards, self._source = shards, source

    def find(self, split: str, image_ids: Sequence[str], count: int = 30) -> dict[str, list[str]]:
        """Find the training images most similar to each image of a split.

        Returns:
            Image id -> training image ids, nearest first (the first in the shards among equals). Empty if the shards
            have no regions, no such training image, or more than `MAX_TRAIN_IMAGES`.
        """
        train_ids, train_TF = self._train
        if not train_ids:
            return {}
        queries = ShardDataset(self._shards, split, "images", {self._source: 1})
        query_ids, split_ids = set(image_ids), queries.image_ids()
        # Positions in the split of the images that were asked for; an image without shards is left out.
        numbers = [number for number, image_id in enumerate(split_ids) if image_id in query_ids]
        neighbors: dict[str, list[str]] = {}
        # train_TF (T, F) @ feature_F (F,) -> (T,): cosines, because all rows have unit length.
        for number, feature_F in zip(numbers, mean_region_features(queries, numbers), strict=True):
            image_id = split_ids[number]
            # One more than asked for, since a query of the training split finds itself.
            order = np.argsort(-(train_TF @ feature_F), kind="stable")[: count + 1]
            neighbors[image_id] = [train_ids[i] for i in order if train_ids[i] != image_id][:count]
        return neighbors

    @cached_property
    def _train(self) -> tuple[Sequence[str], NDArray[np.float32]]:
        """The ids and mean region features of the training images; none if they cannot be searched."""
        none: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        if not read_manifest(self._shards).feature_dim:
            return [], none
        train = ShardDataset(self._shards, "train", "images", {self._source: 1}, captioned=True)
        if not 0 < len(train) <= MAX_TRAIN_IMAGES:
            return [], none
        return train.image_ids(), mean_region_features(train, range(len(train)))
