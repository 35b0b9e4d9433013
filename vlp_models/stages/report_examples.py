"""Test examples for the report: thumbnails with their region boxes, and what the models said of them.

Examples are taken at even distances from the predictions: neither picked nor lucky.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.stages.report_charts import boxes_overlay
from vlp_models.stages.workspace import Workspace

NARROW, WIDE = 240, 400  # pixels of a picture's longer side as the page shows it
BOXES_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of the page; `data` is empty where the file can't be shown, and `problem` then says why."""

    image_id: str
    data: str = ""
    width: int = 0
    height: int = 0
    boxes: Markup = field(default_factory=Markup)
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a gallery shows: the run and one entry an image or question."""

    run: str
    split: str
    rows: list[dict[str, Any]] = field(default_factory=list)


class Pictures:
    """Thumbnails by image id; paths, sizes and boxes come from the validated tables and data/features."""

    def __init__(self, workspace: Workspace, max_pixels: int) -> None:
        self._root = workspace.root
        self._max_pixels = max_pixels
        images = read_table("images", workspace.validated)
        self._paths = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        self._store = FeatureStore(workspace.features) if (workspace.features / "index.parquet").exists() else None

    def get(self, image_id: str, longest: int = NARROW) -> Picture:
        from PIL import Image

        path = self._paths.get(image_id)
        if path is None:
            return Picture(image_id=image_id, problem="not in the validated tables")
        try:
            with Image.open(self._root / path) as image:
                if image.width * image.height > self._max_pixels:
                    return Picture(image_id=image_id, problem=f"{image.width} x {image.height} pixels: too large")
                image.draft("RGB", (longest, longest))
                small = _on_grey(image)
                small.thumbnail((longest, longest))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            return Picture(image_id=image_id, problem=f"can't be read: {error}")
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=82)
        return Picture(
            image_id=image_id,
            data=f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}",
            width=small.width,
            height=small.height,
            boxes=self._boxes(image_id, longest, longest * small.height / small.width),
        )

    def _boxes(self, image_id: str, width: float, height: float) -> Markup:
        """The most confident regions with the detector's name for each."""
        if self._store is None or image_id not in self._store:
            return Markup("")
        regions, classes = self._store.get(image_id), self._store.classes
        shown = []
        for box, probabilities in zip(regions.boxes[:BOXES_SHOWN], regions.class_probs[:BOXES_SHOWN], strict=True):
            best = 1 + int(probabilities[1:].argmax()) if len(probabilities) > 1 else 0
            shown.append((box.tolist(), classes[best] if best < len(classes) else str(best)))
        return boxes_overlay(width, height, shown)


def caption_examples(
    workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """Captions with their references and, where the scene is known, whether they are true of it."""
    found = predictions_of(workspace, run, splits, count)
    if found is None:
        return None
    split, chosen = found
    ids = {row["image_id"] for row in chosen}
    references = grouped("captions", workspace.validated, ids)
    truth = _verdicts(workspace.validated / "truth.jsonl", {row["image_id"]: row["caption"] for row in chosen})
    rows = [
        {
            "picture": pictures.get(row["image_id"]),
            "caption": row["caption"],
            "greedy": row["greedy"] if row["greedy"] != row["caption"] else "",
            "references": [reference["text"] for reference in references.get(row["image_id"], ())],
            "true": truth.get(row["image_id"]),
        }
        for row in chosen
    ]
    return Examples(run=run, split=split, rows=rows)


def question_examples(
    workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """Questions with the five likeliest answers and the annotators' own."""
    from vlp_models.data.answers import most_frequent
    from vlp_models.metrics.vqa import question_accuracy

    found = predictions_of(workspace, run, splits, count)
    if found is None:
        return None
    split, chosen = found
    questions = {
        row["question_id"]: row
        for rows in grouped("questions", workspace.validated, {row["image_id"] for row in chosen}).values()
        for row in rows
    }
    rows = []
    for row in chosen:
        question = questions.get(row["question_id"], {"text": "", "answers": []})
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
    return Examples(run=run, split=split, rows=rows)


def statement_examples(
    workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int
) -> Examples | None:
    """Statements with the model's verdict and the label."""
    found = predictions_of(workspace, run, splits, count)
    if found is None:
        return None
    split, chosen = found
    statements = {
        row["statement_id"]: row["text"]
        for rows in grouped("statements", workspace.validated, {row["image_id"] for row in chosen}).values()
        for row in rows
    }
    rows = [
        {
            "picture": pictures.get(row["image_id"], WIDE),
            "statement": statements.get(row["statement_id"], ""),
            "prediction": row["prediction"],
            "p_true": float(row["p_true"]),
            "label": row["label"],
        }
        for row in chosen
    ]
    return Examples(run=run, split=split, rows=rows)


def predictions_of(
    workspace: Workspace, run: str, splits: Sequence[str], count: int
) -> tuple[str, list[dict[str, Any]]] | None:
    """The first split with predictions, and `count` of its rows at even distances."""
    for split in splits:
        path = workspace.evaluation(run) / f"predictions-{split}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            # From another image each where there are enough: questions of one image stand together.
            return split, list(_evenly(rows, count))
    return None


def _evenly(rows: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    count = min(count, len(rows))
    yield from (rows[i * len(rows) // count] for i in range(count))


def grouped(table: str, validated: Path, image_ids: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Rows of these images, by image id."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = read_table(table, validated)
    kept = rows.filter(pc.is_in(rows["image_id"], value_set=pa.array(sorted(image_ids), pa.string())))
    result: dict[str, list[dict[str, Any]]] = {}
    for row in kept.to_pylist():
        result.setdefault(row["image_id"], []).append(row)
    return result


def _verdicts(path: Path, captions: dict[str, str]) -> dict[str, bool]:
    from vlp_models.metrics.truth import score_truth
    from vlp_models.stages.scoring import read_truth

    scenes = read_truth(path, captions.keys())
    return score_truth(captions, scenes)[1] if scenes else {}


def _on_grey(image: Any) -> Any:
    """RGB; what is transparent becomes mid-grey, as NLVR's pictures are shown."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        base = Image.new("RGBA", rgba.size, (205, 205, 205, 255))
        return Image.alpha_composite(base, rgba).convert("RGB")
    return image.convert("RGB")
