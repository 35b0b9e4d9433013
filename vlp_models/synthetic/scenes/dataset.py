"""Write datasets of scenes: COCO captions and instances, Karpathy's split file, VQA v2, and the scene graphs.

- `objects`: with an option of `SCENE_FILES` also the files of further datasets about the same images, which are written
  elsewhere; the other files stay the same, byte for byte.
- `sentences`: captions of scenes without images, one per line, for pretraining on text alone.

Everything about an image is a function of (seed, split, its number in the split), so images can be made in any order
and a longer split starts with a shorter one's images. Only the balance of the questions depends on a whole split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.device import cpu_count
from vlp_models.common.executors import LocalMapper
from vlp_models.common.plugins import import_target
from vlp_models.common.progress import progress_bar
from vlp_models.data.tables import SPLITS
from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic import SCENE_FILES
from vlp_models.synthetic.scenes.captions import write_captions
from vlp_models.synthetic.scenes.language import split_words
from vlp_models.synthetic.scenes.questions import Balance, Question, annotate, choose
from vlp_models.synthetic.scenes.scene import CATEGORIES, Scene, render, sample_scene

PROCESSES = 2
# the options of `generate` for further files about the scenes
FILE_OPTIONS = ("vcr_per_image", "hypotheses_per_image", "pair_sentences")
MIN_SIDE, MAX_SIDE = 64, 1024
_WORTH_A_POOL = 100  # images; with fewer, starting processes takes longer than drawing
_PIECE = 16  # images that a process draws at a time
# Random streams of an image, one per purpose. Those of contrib are 4 to 6 (reasoning_tasks), 8 and 9 (web_scenes).
SCENE_STREAM, PIXEL_STREAM, CAPTION_STREAM, QUESTION_STREAM = 0, 1, 2, 3
TEXT_SIDE = 64  # pixels; size of the scenes of `write_sentences`, which limits how objects overlap
TEXT_STREAM = 77  # keeps them different from drawn scenes of the same seed
_LICENSE = {"id": 1, "name": "CC0 1.0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}
_INFO = {"description": "Synthetic scenes of objects", "version": "1.0", "year": 2026, "contributor": "vlp-flows"}


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """One image to make."""

    seed: int
    split: str
    number: int  # within the split
    image_id: int
    side: int
    path: Path

    def rng(self, stream: int) -> np.random.Generator:
        # A stream per image and purpose, so an image does not depend on how many others there are.
        return np.random.default_rng([self.seed, SPLITS.index(self.split), self.number, stream])


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image that was made, with its captions."""

    job: ImageJob
    scene: Scene
    captions: Sequence[str]


_Answered = list[tuple[Question, list[dict[str, str | int]]]]  # the questions about one image, with their answers


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write a dataset of scenes into `directory`; return the number of items of each kind.

    Raises:
        ParamsError: a number in params.yaml is out of range, or settings contradict each other.
    """
    _check(params)
    jobs = make_jobs(params, directory)
    pictures: list[Picture] = []
    answered: list[_Answered] = []
    # Each split is balanced by itself, so in none of them an answer is more likely.
    balances = {split: Balance() for split in SPLITS}
    with progress_bar("drawing scenes", len(jobs), "images") as bar:
        for job, scene in zip(jobs, draw_scenes(jobs), strict=True):
            # while other processes draw the next images
            captions = write_captions(scene, job.rng(CAPTION_STREAM), params.misspelled)
            pictures.append(Picture(job=job, scene=scene, captions=captions))
            question_rng = job.rng(QUESTION_STREAM)
            questions = choose(scene, params.questions_per_image, balances[job.split], question_rng)
            answered.append([(question, annotate(question, question_rng)) for question in questions])
            bar.advance()
    counts = write_coco(pictures, params, directory)
    counts["questions"] = _write_questions(jobs, answered, directory)
    for option, target in SCENE_FILES.items():
        if getattr(params, option):
            counts |= import_target(target)(pictures, params, directory)
    return counts


def _check(params: GeneratorParams) -> None:
    if params.questions_per_image > 100:
        raise ParamsError(
            f"params.yaml: `generate`: `questions_per_image` must be 0 to 100; found {params.questions_per_image}"
        )
    if params.simple_pair_sentences and not params.pair_sentences:
        raise ParamsError(
            "params.yaml: `generate`: `simple_pair_sentences` needs `pair_sentences`; set both or neither"
        )
    for key in FILE_OPTIONS:
        if getattr(params, key) and key not in SCENE_FILES:
            raise ParamsError(
                f"params.yaml: `generate`: `{key}` needs the folder vlp_models/contrib/reasoning_tasks; restore it, or "
                "remove the option"
            )


def make_jobs(params: GeneratorParams, directory: Path) -> list[ImageJob]:
    """Make the folders of a dataset of scenes; return its images in order.

    Raises:
        ParamsError: `side` is out of range.
    """
    if not MIN_SIDE <= params.side <= MAX_SIDE:
        raise ParamsError(
            f"params.yaml: `generate`: `side` must be {MIN_SIDE} to {MAX_SIDE} pixels; found {params.side}"
        )
    images = directory / "images"
    (directory / "annotations").mkdir(parents=True)
    images.mkdir()
    # Image ids are consecutive over the splits, starting with 1.
    jobs: list[ImageJob] = []
    for split in SPLITS:
        for number in range(getattr(params, split)):
            image_id = len(jobs) + 1
            path = images / f"COCO_scenes_{image_id:012d}.png"
            job = ImageJob(seed=params.seed, split=split, number=number, image_id=image_id, side=params.side, path=path)
            jobs.append(job)
    return jobs


def write_coco(pictures: Sequence[Picture], params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write captions and objects in COCO's format, and the scene graphs; return counts."""
    jobs, scenes = [picture.job for picture in pictures], [picture.scene for picture in pictures]
    _write_captions(jobs, [picture.captions for picture in pictures], directory)
    boxes = _write_instances(jobs, scenes, directory)
    lines = [json.dumps(scene.to_dict()) + "\n" for scene in scenes]
    (directory / "scenes.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        **{split: getattr(params, split) for split in SPLITS},
        "images": len(jobs),
        "captions": sum(len(picture.captions) for picture in pictures),
        "objects": boxes,
    }


def draw_scenes(jobs: list[ImageJob]) -> Iterator[Scene]:
    """Draw the images, several at a time; yield their scenes in order."""
    workers = cpu_count(PROCESSES)
    if workers == 1 or len(jobs) < _WORTH_A_POOL:
        yield from map(_render_one, jobs)
        return
    pieces = [jobs[i : i + _PIECE] for i in range(0, len(jobs), _PIECE)]
    for scenes in LocalMapper(workers).map(_render_piece, pieces):
        yield from scenes


def _render_piece(jobs: list[ImageJob]) -> list[Scene]:
    return [_render_one(job) for job in jobs]


def _render_one(job: ImageJob) -> Scene:
    scene = sample_scene(job.rng(SCENE_STREAM), image_id=str(job.image_id), split=job.split, side=job.side)
    render(scene, job.rng(PIXEL_STREAM)).save(job.path, format="PNG", compress_level=4)
    return scene


def _write_captions(jobs: list[ImageJob], texts: Sequence[Sequence[str]], directory: Path) -> None:
    """Write COCO captions, and the same captions in Karpathy's split file."""
    annotations: list[dict[str, Any]] = []
    split_file = []
    for number, (job, written) in enumerate(zip(jobs, texts, strict=True)):
        sentences = []
        for text in written:
            # Karpathy's sentence id and COCO's annotation id are the same number.
            sentid = len(annotations)
            annotations.append({"image_id": job.image_id, "id": sentid, "caption": text})
            sentences.append({"tokens": split_words(text), "raw": text, "imgid": number, "sentid": sentid})
        split_file.append(
            {
                "filepath": "images",
                "sentids": [sentence["sentid"] for sentence in sentences],
                "filename": job.path.name,
                "imgid": number,
                "split": job.split,
                "sentences": sentences,
                "cocoid": job.image_id,
            }
        )
    _dump(_coco(jobs, annotations), directory / "annotations" / "captions_scenes.json")
    _dump({"images": split_file, "dataset": "coco"}, directory / "dataset_scenes.json")


def _write_instances(jobs: list[ImageJob], scenes: list[Scene], directory: Path) -> int:
    """Write COCO instances. Box and area are those of the visible pixels; the polygon is the whole shape."""
    annotations: list[dict[str, Any]] = []
    for job, scene in zip(jobs, scenes, strict=True):
        for item in scene.objects:
            x1, y1, x2, y2 = item.box
            points = item.points(job.side)
            polygon = [round(value, 1) for point in points for value in point]
            # The polygon's area by the shoelace formula, times the share of it that is visible
            edges = zip(points, [*points[1:], points[0]], strict=True)
            area = abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in edges)) / 2 * item.visible
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": job.image_id,
                    "category_id": CATEGORIES.index(item.category) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": round(area, 1),
                    "segmentation": [polygon],
                    "iscrowd": 0,
                    "attributes": [item.size, item.texture],
                }
            )
    # A category is a color and a shape, such as `red star`; the shape is its supercategory.
    categories = [
        {"id": number, "name": name, "supercategory": name.split()[1]}
        for number, name in enumerate(CATEGORIES, start=1)
    ]
    _dump({**_coco(jobs, annotations), "categories": categories}, directory / "annotations" / "instances_scenes.json")
    return len(annotations)


def _write_questions(jobs: list[ImageJob], answered: list[_Answered], directory: Path) -> int:
    """Write VQA v2 questions and annotations; return the number of questions."""
    questions, annotations = [], []
    for job, of_image in zip(jobs, answered, strict=True):
        for number, (question, answers) in enumerate(of_image):
            # Unique, because `_check` allows at most 100 questions per image.
            question_id = job.image_id * 1000 + number
            questions.append({"image_id": job.image_id, "question": question.text, "question_id": question_id})
            annotations.append(
                {
                    "question_type": question.kind,
                    "multiple_choice_answer": question.answer,
                    "answers": answers,
                    "image_id": job.image_id,
                    "answer_type": question.answer_type,
                    "question_id": question_id,
                }
            )
    head = {"info": _INFO, "data_type": "mscoco", "data_subtype": "scenes", "license": _LICENSE}
    _dump(
        {**head, "task_type": "Open-Ended", "questions": questions},
        directory / "v2_OpenEnded_mscoco_scenes_questions.json",
    )
    _dump({**head, "annotations": annotations}, directory / "v2_mscoco_scenes_annotations.json")
    return len(questions)


def _coco(jobs: list[ImageJob], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    images = [
        {
            "license": _LICENSE["id"],
            "file_name": job.path.name,
            "coco_url": "",
            "height": job.side,
            "width": job.side,
            "date_captured": "",
            "flickr_url": "",
            "id": job.image_id,
        }
        for job in jobs
    ]
    return {"info": _INFO, "images": images, "licenses": [_LICENSE], "annotations": annotations}


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_sentences(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write `train.txt`, `val.txt`, `test.txt`: five shuffled sentences per scene; train, val and test count scenes."""
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng([params.seed, number, TEXT_STREAM])
        lines: list[str] = []
        for _ in range(getattr(params, split)):
            lines += write_captions(sample_scene(rng, image_id="", split=split, side=TEXT_SIDE), rng, params.misspelled)
        # Shuffled, so that the sentences about one scene are not next to each other.
        shuffled = [lines[i] for i in rng.permutation(len(lines))]
        (directory / f"{split}.txt").write_text("".join(f"{line}\n" for line in shuffled), encoding="utf-8")
        counts[split] = len(lines)
    return {**counts, "texts": sum(counts.values())}
