"""Writes the world of objects: COCO captions and instances, Karpathy's split file, VQA v2, and the scene graphs.

With `vcr_per_image` also questions of VCR's form, with `hypotheses_per_image` SNLI-VE's, with `pair_sentences` NLVR2's;
in files of their own: all others stay the same, byte for byte.
The web world has the same scenes with one alt text each in place of captions and questions, as pairs.csv besides;
alt_texts.jsonl says what is wrong with each.

Everything about an image follows from (seed, split, its number in the split), so images can be made in any order
and a longer split begins with a shorter one's images. Only the balance of the questions looks at a whole split.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from vlp_models.data.tables import SPLITS
from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.captions import Noise, alt_text, captions
from vlp_models.synthetic.scenes.entailment import write_hypotheses
from vlp_models.synthetic.scenes.image_pairs import write_pairs
from vlp_models.synthetic.scenes.language import words_of
from vlp_models.synthetic.scenes.questions import Balance, annotate, choose
from vlp_models.synthetic.scenes.scene import CATEGORIES, Scene, render, sample_scene
from vlp_models.synthetic.scenes.vcr import write_vcr

PROCESSES = 2
MIN_SIDE, MAX_SIDE = 64, 1024
_WORTH_A_POOL = 100  # images; below, starting processes takes longer than drawing
_STREAMS = {
    "scene": 0,
    "pixels": 1,
    "captions": 2,
    "questions": 3,
    "vcr": 4,
    "entailment": 5,
    "pairs": 6,
    "alt text": 8,
    "elsewhere": 9,
}
_LICENCE = {"id": 1, "name": "CC0 1.0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}
_INFO = {"description": "Synthetic scenes of objects", "version": "1.0", "year": 2026, "contributor": "vlp-flows"}


@dataclass(frozen=True, kw_only=True)
class _Order:
    """One image to make."""

    seed: int
    split: str
    number: int  # within the split
    image_id: int
    side: int
    path: Path

    def rng(self, stream: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, SPLITS.index(self.split), self.number, _STREAMS[stream]])


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Writes a dataset of scenes into `directory` and returns how many of each thing there are.

    Raises:
        ParamsError: a number of params.yaml is out of range.
    """
    _check(params)
    images = directory / "images"
    (directory / "annotations").mkdir(parents=True)
    images.mkdir()
    sizes = [(split, number) for split in SPLITS for number in range(getattr(params, split))]
    orders = [
        _Order(
            seed=params.seed,
            split=split,
            number=number,
            image_id=image_id,
            side=params.side,
            path=images / f"COCO_scenes_{image_id:012d}.png",
        )
        for image_id, (split, number) in enumerate(sizes, start=1)
    ]
    scenes = list(
        track(_draw(orders), "drawing scenes", total=len(orders), disable=not Console().is_terminal, transient=True)
    )
    if params.generator == "web":
        texts = _write_alt_texts(orders, scenes, Noise.of(params), directory)
    else:
        told = zip(orders, scenes, strict=True)
        texts = [captions(scene, order.rng("captions"), params.misspelled) for order, scene in told]
    _write_captions(orders, texts, directory)
    boxes = _write_instances(orders, scenes, directory)
    asked = 0 if params.generator == "web" else _write_questions(orders, scenes, params.questions_per_image, directory)
    choices = 0
    if params.vcr_per_image:
        pictures = [(scene, order.rng("vcr"), order.path) for order, scene in zip(orders, scenes, strict=True)]
        choices = write_vcr(pictures, params.vcr_per_image, SPLITS, directory)
    hypotheses = 0
    if params.hypotheses_per_image:
        pictures = [(scene, order.rng("entailment"), order.path) for order, scene in zip(orders, scenes, strict=True)]
        hypotheses = write_hypotheses(pictures, texts, params.hypotheses_per_image, directory)
    compared = 0
    if params.pair_sentences:
        pictures = [(scene, order.rng("pairs"), order.path) for order, scene in zip(orders, scenes, strict=True)]
        compared = write_pairs(pictures, params.pair_sentences, SPLITS, directory, params.simple_pair_sentences)
    lines = [json.dumps(scene.to_dict()) + "\n" for scene in scenes]
    (directory / "scenes.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        **{split: getattr(params, split) for split in SPLITS},
        "images": len(orders),
        "captions": sum(map(len, texts)),
        "objects": boxes,
        "questions": asked,
        **({"choices": choices} if params.vcr_per_image else {}),
        **({"hypotheses": hypotheses} if params.hypotheses_per_image else {}),
        **({"statements": compared} if params.pair_sentences else {}),
    }


def _check(params: GeneratorParams) -> None:
    if not MIN_SIDE <= params.side <= MAX_SIDE:
        raise ParamsError(
            f"params.yaml: `generate`: `side` must be {MIN_SIDE} to {MAX_SIDE} pixels; found {params.side}"
        )
    if not 0 <= params.questions_per_image <= 100:
        raise ParamsError(
            f"params.yaml: `generate`: `questions_per_image` must be 0 to 100; found {params.questions_per_image}"
        )
    for key in ("misspelled", "mismatched", "hypernyms", "dropped_words", "boilerplate"):
        if not 0 <= getattr(params, key) <= 1:
            raise ParamsError(f"params.yaml: `generate`: `{key}` must be 0 to 1; found {getattr(params, key)}")
    besides = ("vcr_per_image", "hypotheses_per_image", "pair_sentences", "simple_pair_sentences")
    if params.generator == "web" and any(getattr(params, key) for key in besides):
        names = ", ".join(f"`{key}`" for key in besides)
        raise ParamsError(f"params.yaml: the generator `web` writes alt texts only; drop {names}, or use `objects`")
    for key in ("seed", *besides, *SPLITS):
        if getattr(params, key) < 0:
            raise ParamsError(f"params.yaml: `generate`: `{key}` must not be negative; found {getattr(params, key)}")
    if params.simple_pair_sentences and not params.pair_sentences:
        raise ParamsError(
            "params.yaml: `generate`: `simple_pair_sentences` come besides `pair_sentences`; set both, or neither"
        )


def _draw(orders: list[_Order]) -> Iterator[Scene]:
    """Draws the images, several at a time, and yields their scenes in order."""
    workers = min(PROCESSES, os.cpu_count() or 1)
    if workers == 1 or len(orders) < _WORTH_A_POOL:
        yield from map(_make, orders)
        return
    # Not fork: the parent may hold threads (torch, a progress bar).
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_make, orders, chunksize=16)


def _make(order: _Order) -> Scene:
    scene = sample_scene(order.rng("scene"), image_id=str(order.image_id), split=order.split, side=order.side)
    render(scene, order.rng("pixels")).save(order.path, format="PNG", compress_level=4)
    return scene


def _write_alt_texts(orders: list[_Order], scenes: list[Scene], noise: Noise, directory: Path) -> list[list[str]]:
    """pairs.csv, and what is wrong with each alt text. Returns the alt texts, a list for each image.

    A mismatched one describes a scene of its own, which is no image: so an image's alt text never depends on the
    number of images.
    """
    told = [
        alt_text(
            scene,
            sample_scene(order.rng("elsewhere"), image_id="", split=order.split, side=order.side),
            order.rng("alt text"),
            noise,
        )
        for order, scene in zip(orders, scenes, strict=True)
    ]
    with (directory / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["image", "caption", "split"])
        rows.writerows([f"images/{o.path.name}", alt.text, o.split] for o, alt in zip(orders, told, strict=True))
    lines = [
        json.dumps({"image_id": str(order.image_id), **dataclasses.asdict(alt)}) + "\n"
        for order, alt in zip(orders, told, strict=True)
    ]
    (directory / "alt_texts.jsonl").write_text("".join(lines), encoding="utf-8")
    return [[alt.text] for alt in told]


def _write_captions(orders: list[_Order], texts: list[list[str]], directory: Path) -> None:
    """COCO captions, and the same captions once more in Karpathy's split file."""
    annotations: list[dict[str, Any]] = []
    split_file = []
    for number, (order, written) in enumerate(zip(orders, texts, strict=True)):
        sentences = []
        for text in written:
            sentid = len(annotations)
            annotations.append({"image_id": order.image_id, "id": sentid, "caption": text})
            sentences.append({"tokens": words_of(text), "raw": text, "imgid": number, "sentid": sentid})
        split_file.append(
            {
                "filepath": "images",
                "sentids": [sentence["sentid"] for sentence in sentences],
                "filename": order.path.name,
                "imgid": number,
                "split": order.split,
                "sentences": sentences,
                "cocoid": order.image_id,
            }
        )
    _dump(_coco(orders, annotations), directory / "annotations" / "captions_scenes.json")
    _dump({"images": split_file, "dataset": "coco"}, directory / "dataset_scenes.json")


def _write_instances(orders: list[_Order], scenes: list[Scene], directory: Path) -> int:
    """COCO instances. Box and area are those of the visible pixels; the polygon is the whole outline."""
    annotations: list[dict[str, Any]] = []
    for order, scene in zip(orders, scenes, strict=True):
        for item in scene.objects:
            x1, y1, x2, y2 = item.box
            points = item.points(order.side)
            outline = [round(value, 1) for point in points for value in point]
            area = _polygon_area(points) * item.visible
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": order.image_id,
                    "category_id": CATEGORIES.index(item.category) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": round(area, 1),
                    "segmentation": [outline],
                    "iscrowd": 0,
                    "attributes": [item.size, item.texture],
                }
            )
    categories = [
        {"id": number, "name": name, "supercategory": name.split()[1]}
        for number, name in enumerate(CATEGORIES, start=1)
    ]
    _dump({**_coco(orders, annotations), "categories": categories}, directory / "annotations" / "instances_scenes.json")
    return len(annotations)


def _write_questions(orders: list[_Order], scenes: list[Scene], per_image: int, directory: Path) -> int:
    """VQA v2 questions and annotations."""
    questions, annotations = [], []
    balances = {split: Balance() for split in SPLITS}
    for order, scene in zip(orders, scenes, strict=True):
        rng = order.rng("questions")
        for number, question in enumerate(choose(scene, per_image, balances[order.split], rng)):
            question_id = order.image_id * 1000 + number
            questions.append({"image_id": order.image_id, "question": question.text, "question_id": question_id})
            annotations.append(
                {
                    "question_type": question.kind,
                    "multiple_choice_answer": question.answer,
                    "answers": annotate(question, rng),
                    "image_id": order.image_id,
                    "answer_type": question.answer_type,
                    "question_id": question_id,
                }
            )
    head = {"info": _INFO, "data_type": "mscoco", "data_subtype": "scenes", "license": _LICENCE}
    _dump(
        {**head, "task_type": "Open-Ended", "questions": questions},
        directory / "v2_OpenEnded_mscoco_scenes_questions.json",
    )
    _dump({**head, "annotations": annotations}, directory / "v2_mscoco_scenes_annotations.json")
    return len(questions)


def _coco(orders: list[_Order], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    images = [
        {
            "license": _LICENCE["id"],
            "file_name": order.path.name,
            "coco_url": "",
            "height": order.side,
            "width": order.side,
            "date_captured": "",
            "flickr_url": "",
            "id": order.image_id,
        }
        for order in orders
    ]
    return {"info": _INFO, "images": images, "licenses": [_LICENCE], "annotations": annotations}


def _polygon_area(points: list[tuple[float, float]]) -> float:
    """The shoelace formula."""
    around = zip(points, [*points[1:], points[0]], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in around)) / 2


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


SIDE = 64  # pixels, at which objects are kept from covering each other
STREAM = 77  # apart from the seeds of drawn scenes: the same seed there gives other scenes


def write_sentences(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """train, val and test count scenes.

    Raises:
        ParamsError: a number of params.yaml is out of range.
    """
    if not 0 <= params.misspelled <= 1:
        raise ParamsError(f"params.yaml: `generate`: `misspelled` must be 0 to 1; found {params.misspelled}")
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng([params.seed, number, STREAM])
        lines: list[str] = []
        for _ in range(getattr(params, split)):
            lines += captions(sample_scene(rng, image_id="", split=split, side=SIDE), rng, params.misspelled)
        shuffled = [lines[i] for i in rng.permutation(len(lines))]
        (directory / f"{split}.txt").write_text("".join(f"{line}\n" for line in shuffled), encoding="utf-8")
        counts[split] = len(lines)
    return {**counts, "texts": sum(counts.values())}
