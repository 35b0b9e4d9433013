"""Test examples of the tasks that choose among several: images found by caption."""

from __future__ import annotations

from collections.abc import Sequence

from vlp_models.stages.report_examples import Examples, Pictures, predictions_of
from vlp_models.stages.workspace import Workspace


def retrieval_examples(
    workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """The first caption of an image, where its image was placed, and the image that came first."""
    found = predictions_of(workspace, run, splits, count)
    if found is None:
        return None
    split, chosen = found
    rows = [
        {
            "picture": pictures.get(row["image_id"]),
            "caption": row["captions"][0]["caption"],
            "rank": row["captions"][0]["rank"],
            "first": pictures.get(row["captions"][0]["top"][0][0]),
        }
        for row in chosen
        if row["captions"]
    ]
    return Examples(run=run, split=split, rows=rows)
