"""Are captions true? Counted where the scene behind an image is known (the synthetic worlds)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlp_models.metrics.score import Score, mean_score


def score_truth(
    captions: Mapping[str, str], scenes: Mapping[str, dict[str, Any]]
) -> tuple[list[Score], dict[str, bool]]:
    """Share of captions true of their scene, the share that says anything that can be checked, and how much of the
    scene's facts true claims state.

    Args:
        captions: image id -> caption.
        scenes: image id -> a line of truth.jsonl; images without one are left out.

    Returns:
        The scores, and image id -> whether its caption is true.
    """
    from vlp_models.synthetic.scenes.checker import check

    ids = [image_id for image_id in captions if image_id in scenes]
    verdicts = [check(captions[image_id], scenes[image_id]) for image_id in ids]
    true = [verdict.true is True for verdict in verdicts]
    scores = [
        mean_score("true captions", [float(value) for value in true], ids),
        mean_score("checkable captions", [float(verdict.true is not None) for verdict in verdicts], ids),
        mean_score("scene facts told", [verdict.informative for verdict in verdicts], ids),
    ]
    return scores, dict(zip(ids, true, strict=True))
