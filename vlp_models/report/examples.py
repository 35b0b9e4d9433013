"""Test examples for the report: what the models said of images, beside what is right.

Examples are taken at even distances from the predictions: neither picked nor lucky. Each task has a function
(workspace, pictures, predictions) -> one entry a prediction, which the template knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.data.tables import read_table
from vlp_models.report.pictures import WIDE, Pictures
from vlp_models.workspace.paths import Workspace

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a gallery shows: the run and one entry an image or question."""

    run: str
    split: str
    rows: Rows = field(default_factory=list)


def read_examples(
    task: str, workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """Of the first split with predictions, `count` entries; None where there are no predictions."""
    for split in splits:
        path = workspace.evaluation(run) / f"predictions-{split}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            return Examples(run=run, split=split, rows=GALLERIES[task](workspace, pictures, list(_evenly(rows, count))))
    return None


def _captions(workspace: Workspace, pictures: Pictures, predictions: Rows) -> Rows:
    """Captions with their references and, where the scene is known, whether they are true of it."""
    references = _grouped("captions", workspace, predictions)
    truth = _verdicts(workspace.validated / "truth.jsonl", {row["image_id"]: row["caption"] for row in predictions})
    return [
        {
            "picture": pictures.get(row["image_id"]),
            "caption": row["caption"],
            "greedy": row["greedy"] if row["greedy"] != row["caption"] else "",
            "references": [reference["text"] for reference in references.get(row["image_id"], ())],
            "true": truth.get(row["image_id"]),
        }
        for row in predictions
    ]


def _questions(workspace: Workspace, pictures: Pictures, predictions: Rows) -> Rows:
    """Questions with the five likeliest answers and the annotators' own."""
    from vlp_models.data.answers import most_frequent
    from vlp_models.metrics.vqa import question_accuracy

    asked = _by_id("questions", "question_id", workspace, predictions)
    rows = []
    for row in predictions:
        question = asked.get(row["question_id"], {"text": "", "answers": []})
        answers = question["answers"] or []
        rows.append(
            {
                "picture": pictures.get(row["image_id"]),
                "question": question["text"],
                "top": [(text, float(probability)) for text, probability in row["top"]],
                "answer": row["answer"],
                "blank": row.get("answer_blank", ""),
                "truth": most_frequent(answers) if answers else "",
                "accuracy": question_accuracy(row["answer"], answers) if answers else None,
            }
        )
    return rows


def _statements(workspace: Workspace, pictures: Pictures, predictions: Rows) -> Rows:
    """Statements with the model's verdict and the label."""
    statements = _by_id("statements", "statement_id", workspace, predictions)
    return [
        {
            "picture": pictures.get(row["image_id"], WIDE),
            "statement": statements.get(row["statement_id"], {"text": ""})["text"],
            "prediction": row["prediction"],
            "p_true": float(row["p_true"]),
            "label": row["label"],
        }
        for row in predictions
    ]


def _retrieval(workspace: Workspace, pictures: Pictures, predictions: Rows) -> Rows:
    """The first caption of an image, where its image was placed, and the image that came first."""
    return [
        {
            "picture": pictures.get(row["image_id"]),
            "caption": row["captions"][0]["caption"],
            "rank": row["captions"][0]["rank"],
            "first": pictures.get(row["captions"][0]["top"][0][0]),
        }
        for row in predictions
        if row["captions"]
    ]


def _choices(workspace: Workspace, pictures: Pictures, predictions: Rows) -> Rows:
    """Questions with their answers and rationales, what was chosen and what is right."""
    asked = _by_id("choices", "choice_id", workspace, predictions)
    rows = []
    for row in predictions:
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
    return rows


GALLERIES = {
    "captioning": _captions,
    "vqa": _questions,
    "nlvr": _statements,
    "retrieval": _retrieval,
    "vcr": _choices,
}


def _evenly(rows: Rows, count: int) -> Iterator[dict[str, Any]]:
    """`count` rows at even distances: of another image each where there are enough, as one image's stand together."""
    count = min(count, len(rows))
    yield from (rows[i * len(rows) // count] for i in range(count))


def _grouped(table: str, workspace: Workspace, predictions: Rows) -> dict[str, Rows]:
    """The table's rows of the predictions' images, by image id."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = read_table(table, workspace.validated)
    wanted = pa.array(sorted({row["image_id"] for row in predictions}), pa.string())
    result: dict[str, Rows] = {}
    for row in rows.filter(pc.is_in(rows["image_id"], value_set=wanted)).to_pylist():
        result.setdefault(row["image_id"], []).append(row)
    return result


def _by_id(table: str, key: str, workspace: Workspace, predictions: Rows) -> dict[str, dict[str, Any]]:
    return {row[key]: row for rows in _grouped(table, workspace, predictions).values() for row in rows}


def _verdicts(path: Path, captions: dict[str, str]) -> dict[str, bool]:
    from vlp_models.evaluation.scoring import read_truth
    from vlp_models.metrics.truth import score_truth

    scenes = read_truth(path, captions.keys())
    return score_truth(captions, scenes)[1] if scenes else {}
