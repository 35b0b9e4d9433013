"""The nearest-neighbor caption for new photos: what the baseline of captioning's evaluation answers.

It needs no trained captioner: the regions of the workspace's shards and their captions. It is served while no trained
model is better than it.

Shape suffixes: N training images, F feature dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vlp_models.common.workspace import Workspace, require_output
from vlp_models.data.shards.dataset import ShardDataset, mean_region_features, normalize_rows
from vlp_models.errors import DataError
from vlp_models.metrics.consensus import ConsensusCaptions
from vlp_models.serving.images import open_image
from vlp_models.tasks.captioning import NEIGHBORS
from vlp_models.vision.extractors import open_extractor

METHOD = f"the caption that the {NEIGHBORS} most similar training photos agree on"


class NeighborCaptioner:
    """Captions a photo with one of the captions of the training photos that look most similar.

    Raises:
        DataError: the shards are missing, have no regions or no captioned training image, or were made with another
            detector than the workspace's.
        CheckpointError: the regions cannot be computed from an image.
    """

    def __init__(self, workspace: Workspace, features: Mapping[str, Any], sources: Iterable[str]) -> None:
        """
        Args:
            features: section `features` of params.yaml.
            sources: the datasets with the training photos.
        """
        require_output(workspace.shards, "shards")
        # Only captioned images: a neighbor without captions has nothing to offer.
        train = ShardDataset(workspace.shards, "train", "images", dict.fromkeys(sources, 1), captioned=True)
        if not train.manifest.feature_dim or not len(train):
            raise DataError(
                f"{workspace.shards}: no captioned training image with regions, so there is no nearest-neighbor caption"
            )
        self._extractor = open_extractor(features, workspace.detector, "cpu")
        # Features of two detectors are not comparable, so neighbors would be arbitrary.
        if self._extractor.detector_id != train.manifest.detector_id:
            raise DataError(
                f"{workspace.shards}: its regions are those of detector {train.manifest.detector_id}, and "
                f"{workspace.detector} has {self._extractor.detector_id}; run `vlp run`"
            )
        self._image_ids = train.image_ids()
        # (N, F): the mean of each image's regions, with unit length.
        self._features_NF = mean_region_features(train, range(len(train)))
        self._references = train.references()
        self._consensus = ConsensusCaptions(self._references)

    def caption(self, images: Sequence[Any]) -> list[str]:
        """Return one caption per image, as the baseline chooses it.

        Args:
            images: anything `serving.images.open_image` takes.

        Raises:
            DataError: an image cannot be opened.
        """
        # Of the nearest photos' captions, the one that agrees best with the others.
        return [self._consensus.choose(self._nearest(image)) for image in images]

    def similar(self, image: Any, count: int) -> list[tuple[str, str]]:
        """Return the ids of the most similar training photos, each with its first caption; errors as in `caption`."""
        return [(image_id, self._references[image_id][0]) for image_id in self._nearest(image)[:count]]

    def _nearest(self, image: Any) -> list[str]:
        """Return the ids of the nearest training photos, most similar first."""
        (regions,) = self._extractor.extract([open_image(image)])
        # (R, F) -> (1, F); without regions the mean is 0, whose similarity to every photo is 0.
        mean_1F = np.zeros((1, self._features_NF.shape[1]), np.float32)
        if len(regions):
            mean_1F[0] = np.asarray(regions.features).astype(np.float32).mean(0)
        # (N, F) @ (F,) -> (N,): cosine similarities, because the rows have unit length.
        similarity_N = self._features_NF @ normalize_rows(mean_1F)[0]
        # Stable, so equal photos keep the order of the shards, on every machine.
        return [self._image_ids[n] for n in np.argsort(-similarity_N, kind="stable")[:NEIGHBORS]]
