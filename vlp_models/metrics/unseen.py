"""Scores on the unseen test items: the model's and its baselines', on the same items.

An item is seen if its image or its sentence has a near-duplicate in the training data of the run; its slices say so.
A model and a nearest neighbor both gain from seen items, so neither value alone shows what is left of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlp_models.metrics.bootstrap import LEVELS, MIN_GROUPS, resample, sum_by_group
from vlp_models.metrics.score import FloatArray, ItemScores

SEEN_IMAGE, SEEN_TEXT = "seen=image", "seen=text"  # slices
MIN_ITEMS = 20  # items that must remain to report a score


def score_unseen(scores: ItemScores, constants: Mapping[str, float], *, resamples: int, seed: int) -> dict[str, Any]:
    """Score again in two steps: without the items with a seen image, and without those with a seen sentence too.

    Args:
        constants: baselines without values per item, such as chance: the same on any items.

    Returns:
        {images, texts: number of seen items; without_images, without_both: {value, low, high, n, baselines}, or None if
        fewer than `MIN_ITEMS` remain}. baselines: name -> {value, low, high, gain: {value, low, high}}; the gain is
        the score less the baseline, with its paired interval.
    """
    images = {i for i, slices in enumerate(scores.slices) if SEEN_IMAGE in slices}
    texts = {i for i, slices in enumerate(scores.slices) if SEEN_TEXT in slices}

    def score_others(seen: set[int]) -> dict[str, Any] | None:
        rows = [i for i in range(len(scores.items)) if i not in seen]
        return _score_rows(scores, rows, constants, resamples, seed) if len(rows) >= MIN_ITEMS else None

    without_images = score_others(images)
    return {
        "images": len(images),
        "texts": len(texts),
        "without_images": without_images,
        # If each item with a seen sentence has a seen image, the second step leaves out no more.
        "without_both": without_images if texts <= images else score_others(images | texts),
    }


def _score_rows(
    scores: ItemScores, rows: Sequence[int], constants: Mapping[str, float], resamples: int, seed: int
) -> dict[str, Any]:
    # The model and its baselines side by side, [N, (1 + B) * K]: one draw of the images resamples all of them.
    sides = [scores.parts_NK, *scores.baselines.values()]
    names, sums_GK = sum_by_group([scores.groups[i] for i in rows], np.hstack(sides)[list(rows)])

    def values(summed_SK: FloatArray) -> FloatArray:
        """Return the values [1 + B, S]."""
        statistic = scores.statistics[scores.statistic]
        return np.stack([statistic(side_SK) for side_SK in np.split(summed_SK, len(sides), axis=1)])

    total = values(sums_GK.sum(axis=0, keepdims=True))[:, 0]
    drawn = values(resample(sums_GK, resamples, seed)) if len(names) >= MIN_GROUPS and resamples else None
    # Constants are further rows.
    total = np.concatenate([total, list(constants.values())])
    if drawn is not None:
        constant_rows = [np.full(drawn.shape[1], value) for value in constants.values()]
        drawn = np.stack([*drawn, *constant_rows])

    def figure(value: float, drawn_S: FloatArray | None) -> dict[str, float | None]:
        low, high = (None, None) if drawn_S is None else np.percentile(drawn_S, LEVELS).round(4).tolist()
        return {"value": round(float(value), 4), "low": low, "high": high}

    baselines = {}
    for row, name in enumerate([*scores.baselines, *constants], start=1):
        gain = figure(total[0] - total[row], None if drawn is None else drawn[0] - drawn[row])
        baselines[name] = {**figure(total[row], None if drawn is None else drawn[row]), "gain": gain}
    return {**figure(total[0], None if drawn is None else drawn[0]), "n": len(rows), "baselines": baselines}
