"""The training images that look most like others: by the cosine of their regions' mean features (data/pooled.py).

Shape suffixes: Q images asked for, T of train, F numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlp_models.data.pooled import pooled
from vlp_models.data.shards.dataset import ShardDataset, read_manifest

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
