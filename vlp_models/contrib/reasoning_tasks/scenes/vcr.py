"""VCR questions about scenes: a tagged object, four answers, and four rationales for the right answer.

The four options differ in an attribute of the tagged object: its color, or the corner it is in. Colors and corners are
equally likely, wrong options are drawn from all other values, and the order is random. So text alone is at chance, for
the answer and, given the right answer, for the rationale: all four rationales repeat the answer's attribute and differ
in the other one.

Objects are referred to by shape, as VCR's are by category; only objects with a unique shape are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.tables import SPLITS
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import Picture
from vlp_models.synthetic.scenes.questions import REGIONS, find_region, find_unique
from vlp_models.synthetic.scenes.scene import COLORS, Scene, SceneObject

CHOICES = 4
STREAM = 4  # of an image's random numbers
CORNERS = tuple(region for region in REGIONS if region != "middle")
Tokens = list[Any]  # words, and lists of object numbers


def write_vcr(pictures: Sequence[Picture], params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write `<split>.jsonl` and, next to each image, its metadata; return the number of questions."""
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    for picture in pictures:
        scene, path = picture.scene, picture.job.path
        metadata = path.with_suffix(".json")
        metadata.write_text(json.dumps(_metadata(scene)), encoding="utf-8")
        in_split = lines[scene.split]
        for number, question in enumerate(make_questions(scene, params.vcr_per_image, picture.job.rng(STREAM))):
            record = question | {
                "movie": "scenes",
                "img_fn": path.name,
                "metadata_fn": metadata.name,
                "img_id": f"{scene.split}-{scene.image_id}",
                "question_number": number,
                "annot_id": f"{scene.split}-{len(in_split)}",
                "match_fold": f"{scene.split}-0",
                "match_index": len(in_split),
            }
            in_split.append(json.dumps(record) + "\n")
    for split, written in lines.items():
        (directory / f"{split}.jsonl").write_text("".join(written), encoding="utf-8")
    return {"choices": sum(map(len, lines.values()))}


def make_questions(scene: Scene, number: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield up to `number` different questions: the fields of a VCR record that describe the question."""
    items = [item for item in find_unique(scene, "shape") if find_region(item) in CORNERS]
    possible = [(item, kind) for item in items for kind in ("color", "corner")]
    for index in rng.permutation(len(possible))[:number]:
        item, kind = possible[index]
        yield _question(scene, item, kind, rng)


def _question(scene: Scene, item: SceneObject, kind: str, rng: np.random.Generator) -> dict[str, Any]:
    # A tag is a list of object numbers, from 0; here of one.
    tag = [scene.objects.index(item)]
    corner = find_region(item)
    assert corner is not None
    # Four options each, and the index of the true one. One attribute is the answer, the other one the rationale.
    colors, true_color = _options(item.color, COLORS, rng)
    corners, true_corner = _options(corner, CORNERS, rng)
    if kind == "color":
        question: Tokens = ["What", "color", "is", tag, "?"]
        answers: list[Tokens] = [[tag, "is", value, "."] for value in colors]
        rationales: list[Tokens] = [
            [tag, "in", "the", *value.split(), "corner", "is", item.color, "."] for value in corners
        ]
        answer_label, rationale_label = true_color, true_corner
    else:
        question = ["Where", "is", tag, "?"]
        answers = [[tag, "is", "in", "the", *value.split(), "corner", "."] for value in corners]
        rationales = [["The", value, tag, "is", "in", "the", *corner.split(), "corner", "."] for value in colors]
        answer_label, rationale_label = true_corner, true_color
    return {
        "objects": [o.shape for o in scene.objects],
        "interesting_scores": [0],
        "answer_likelihood": "likely",
        "question_orig": _original(question),
        "answer_orig": _original(answers[answer_label]),
        "rationale_orig": _original(rationales[rationale_label]),
        "question": question,
        "answer_choices": answers,
        "answer_label": answer_label,
        "rationale_choices": rationales,
        "rationale_label": rationale_label,
        "answer_match_iter": [0] * CHOICES,
        "answer_sources": [0] * CHOICES,
        "rationale_match_iter": [0] * CHOICES,
        "rationale_sources": [0] * CHOICES,
    }


def _options(true: str, values: Sequence[str], rng: np.random.Generator) -> tuple[list[str], int]:
    """Return four different values in random order, including the true one, and its index."""
    wrong = [value for value in values if value != true]
    candidates = [true, *(wrong[i] for i in rng.permutation(len(wrong))[: CHOICES - 1])]
    options = [candidates[i] for i in rng.permutation(CHOICES)]
    return options, options.index(true)


def _metadata(scene: Scene) -> dict[str, Any]:
    segments = []
    for item in scene.objects:
        segments.append([[list(point) for point in item.points(scene.side)]])  # one polygon per object
    return {
        # In VCR the fifth number of a box is the detector's confidence.
        "boxes": [[*map(float, item.box), 1.0] for item in scene.objects],
        "segms": segments,
        "names": [item.shape for item in scene.objects],
        "width": scene.side,
        "height": scene.side,
    }


def _original(tokens: Tokens) -> str:
    """Return the text as annotators typed it: tags count from 1."""
    words = []
    for token in tokens:
        words.append(token if isinstance(token, str) else " and ".join(str(number + 1) for number in token))
    return " ".join(words)
