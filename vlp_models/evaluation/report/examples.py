"""Test examples for the report: what the models said of images, beside what is right.

Examples are taken at even distances from the predictions: neither picked nor lucky. What a card shows is the task's
(`TaskModel.cards`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.pictures import Pictures
from vlp_models.tasks import task_class
from vlp_models.tasks.gallery import Card, Gallery

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a gallery shows: the run, its model, and one card an image or question."""

    gallery: Gallery
    model: str
    run: str
    split: str
    cards: Sequence[Card] = field(default_factory=list)


def read_examples(
    task: str,
    workspace: Workspace,
    pictures: Pictures,
    run: str,
    splits: Sequence[str],
    count: int,
    *,
    model: str,
) -> Examples | None:
    """Of the first split with predictions, `count` entries, or half of them where the task's cards are long; None where
    there are no predictions, or the task has no gallery."""
    about = task_class(task).gallery
    if about is None:
        return None
    for split in splits:
        path = workspace.evaluation(run) / f"predictions-{split}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            chosen = list(_evenly(rows, count if about.every else (count + 1) // 2))
            cards = task_class(task).cards(workspace, pictures, chosen)
            return Examples(gallery=about, model=model, run=run, split=split, cards=cards)
    return None


def _evenly(rows: Rows, count: int) -> Iterator[dict[str, Any]]:
    """`count` rows at even distances: of another image each where there are enough, as one image's stand together."""
    count = min(count, len(rows))
    yield from (rows[i * len(rows) // count] for i in range(count))
