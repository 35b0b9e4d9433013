"""How images look, in one vector each: the direction of their regions' mean feature.

What the shards hold is all that is asked, so it is at hand wherever a model reads regions; of a backbone's cells the
mean is its pooled feature.

Shape suffixes: N images, F numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.dataset import ShardDataset

BLOCK = 256  # images in memory with all their regions


def pooled(dataset: ShardDataset, numbers: Sequence[int], max_regions: int | None = None) -> NDArray[np.float32]:
    """Of length one; zeros where an image has no region. [N, F]

    Args:
        max_regions: what a model reads of an image at most; None: all regions that there are.
    """
    pooled_NF = np.zeros((len(numbers), dataset.manifest.feature_dim), np.float32)
    for start in range(0, len(numbers), BLOCK):
        for place, sample in enumerate(dataset.__getitems__(list(numbers[start : start + BLOCK])), start):
            if sample.regions is not None and len(sample.regions):
                pooled_NF[place] = sample.regions.features[:max_regions].astype(np.float32).mean(0)
    return pooled_NF / np.maximum(np.linalg.norm(pooled_NF, axis=1, keepdims=True), 1e-12)
