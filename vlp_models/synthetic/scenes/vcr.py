"""Questions of VCR's form about scenes: a tagged object, four answers, and four rationales for the right answer.

What distinguishes the four is an attribute of the tagged object: its colour, or the corner it lies in. The world
treats colours alike and corners alike, the wrong values are drawn from all others, and the order is random. So text
alone can't do better than chance, neither for the answer nor, given the right answer, for the rationale: all four
repeat the answer's attribute and differ in the other one.

Objects go by their shape, as VCR's go by their category, and only objects whose shape no other one has are asked about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.synthetic.scenes.questions import REGIONS, alone, region_of
from vlp_models.synthetic.scenes.scene import COLOURS, Scene, SceneObject

CHOICES = 4
CORNERS = tuple(region for region in REGIONS if region != "middle")
Tokens = list[Any]  # words, and lists of object numbers


def write_vcr(
    pictures: Sequence[tuple[Scene, np.random.Generator, Path]], per_image: int, splits: Sequence[str], directory: Path
) -> int:
    """Writes `<split>.jsonl` and, beside each image, its metadata; returns how many questions there are.

    Args:
        pictures: scene, random numbers, image file; the annotations name files as they lie below `directory`/images.
    """
    lines: dict[str, list[str]] = {split: [] for split in splits}
    for scene, rng, path in pictures:
        metadata = path.with_suffix(".json")
        metadata.write_text(json.dumps(_metadata(scene)), encoding="utf-8")
        of_split = lines[scene.split]
        for number, asked in enumerate(ask(scene, per_image, rng)):
            record = asked | {
                "movie": "scenes",
                "img_fn": path.name,
                "metadata_fn": metadata.name,
                "img_id": f"{scene.split}-{scene.image_id}",
                "question_number": number,
                "annot_id": f"{scene.split}-{len(of_split)}",
                "match_fold": f"{scene.split}-0",
                "match_index": len(of_split),
            }
            of_split.append(json.dumps(record) + "\n")
    for split, written in lines.items():
        (directory / f"{split}.jsonl").write_text("".join(written), encoding="utf-8")
    return sum(map(len, lines.values()))


def ask(scene: Scene, number: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Up to `number` different questions: the fields of a VCR line that are about the question."""
    items = [item for item in alone(scene, "shape") if region_of(item) in CORNERS]
    possible = [(item, kind) for item in items for kind in ("colour", "place")]
    for index in rng.permutation(len(possible))[:number]:
        item, kind = possible[index]
        yield _question(scene, item, kind, rng)


def _question(scene: Scene, item: SceneObject, kind: str, rng: np.random.Generator) -> dict[str, Any]:
    tag = [scene.objects.index(item)]
    corner = region_of(item)
    assert corner is not None
    colours, colour = _options(item.colour, COLOURS, rng)
    corners, place = _options(corner, CORNERS, rng)
    if kind == "colour":
        question: Tokens = ["What", "color", "is", tag, "?"]
        answers: list[Tokens] = [[tag, "is", value, "."] for value in colours]
        rationales: list[Tokens] = [
            [tag, "in", "the", *value.split(), "corner", "is", item.colour, "."] for value in corners
        ]
        right, reason = colour, place
    else:
        question = ["Where", "is", tag, "?"]
        answers = [[tag, "is", "in", "the", *value.split(), "corner", "."] for value in corners]
        rationales = [["The", value, tag, "is", "in", "the", *corner.split(), "corner", "."] for value in colours]
        right, reason = place, colour
    return {
        "objects": [o.shape for o in scene.objects],
        "interesting_scores": [0],
        "answer_likelihood": "likely",
        "question_orig": _original(question),
        "answer_orig": _original(answers[right]),
        "rationale_orig": _original(rationales[reason]),
        "question": question,
        "answer_choices": answers,
        "answer_label": right,
        "rationale_choices": rationales,
        "rationale_label": reason,
        "answer_match_iter": [0] * CHOICES,
        "answer_sources": [0] * CHOICES,
        "rationale_match_iter": [0] * CHOICES,
        "rationale_sources": [0] * CHOICES,
    }


def _options(true: str, values: Sequence[str], rng: np.random.Generator) -> tuple[list[str], int]:
    """Four different values, the true one among them, in random order; and its place."""
    others = [value for value in values if value != true]
    wrong = [others[i] for i in rng.permutation(len(others))[: CHOICES - 1]]
    options = [[true, *wrong][i] for i in rng.permutation(CHOICES)]
    return options, options.index(true)


def _metadata(scene: Scene) -> dict[str, Any]:
    return {
        "boxes": [[*map(float, item.box), 1.0] for item in scene.objects],
        "segms": [[[list(point) for point in item.points(scene.side)]] for item in scene.objects],
        "names": [item.shape for item in scene.objects],
        "width": scene.side,
        "height": scene.side,
    }


def _original(tokens: Tokens) -> str:
    """As annotators typed it: tags count from 1."""
    return " ".join(t if isinstance(t, str) else " and ".join(str(n + 1) for n in t) for t in tokens)
