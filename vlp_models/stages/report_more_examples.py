"""Test examples of the tasks that choose among several, and the galleries of all tasks."""

from __future__ import annotations

from collections.abc import Sequence

from vlp_models.stages.report_examples import (
    Examples,
    Pictures,
    caption_examples,
    grouped,
    predictions_of,
    question_examples,
    statement_examples,
)
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


def choice_examples(
    workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """Questions with their answers and rationales, what was chosen and what is right."""
    found = predictions_of(workspace, run, splits, count)
    if found is None:
        return None
    split, chosen = found
    asked = {
        row["choice_id"]: row
        for rows in grouped("choices", workspace.validated, {row["image_id"] for row in chosen}).values()
        for row in rows
    }
    rows = []
    for row in chosen:
        question = asked.get(row["choice_id"], {"text": "", "answers": [], "rationales": []})
        rows.append(
            {
                "picture": pictures.get(row["image_id"]),
                "question": question["text"],
                "parts": [
                    {"texts": question["answers"], "chosen": row["answer"], "label": row["answer_label"]},
                    {"texts": question["rationales"], "chosen": row["rationale"], "label": row["rationale_label"]},
                ],
            }
        )
    return Examples(run=run, split=split, rows=rows)


GALLERIES = {
    "captioning": caption_examples,
    "vqa": question_examples,
    "nlvr": statement_examples,
    "retrieval": retrieval_examples,
    "vcr": choice_examples,
}
