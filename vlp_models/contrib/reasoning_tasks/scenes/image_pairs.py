"""NLVR2 statements about pairs of scenes, in the layout of NLVR2's files: `nlvr2/data` and `nlvr2/images`.

Four scenes form a set: two left and two right images, hence four pairs. A sentence is used with all four, and with each
image it is once true and once false. So neither the text alone nor the text with one of the images determines the
label: only the comparison does.

Such sentences alone are hard to learn from scratch: as long as a model recognizes neither image, no answer is better
than another. The train split may also have simple sentences, which one image, or each image by itself, decides. They
too are true of two of a set's four pairs, so that text alone gives nothing away.

As in the original files, val is a directory of train (`VALIDATION`), test is test1, and each pair has its own two image
files: each scene is stored in two of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.tables import SPLITS
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import Picture
from vlp_models.synthetic.scenes.language import NUMBERS, Description
from vlp_models.synthetic.scenes.scene import COLORS, SHAPES, TEXTURES, Scene

DIRECTORIES = {"train": 0, "val": 1}  # directories of the official train split
VALIDATION = str(DIRECTORIES["val"])  # `validation_directories` of a dataset that reads these files
STREAM = 6  # of an image's random numbers
SIDE = 2  # number of left images, and of right images, in a set
_TRIES = 400


@dataclass(frozen=True)
class Comparison:
    """A sentence that compares how many objects match in the left and in the right scene."""

    text: str
    description: Description
    test_counts: Callable[[int, int], bool]

    def is_true_of(self, left: Scene, right: Scene) -> bool:
        return self.test_counts(len(self.description.find_in(left)), len(self.description.find_in(right)))


def write_pairs(pictures: Sequence[Picture], params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write the NLVR2 files below `directory`/nlvr2; return the number of statements."""
    root = directory / "nlvr2"
    (root / "data").mkdir(parents=True)
    lines: dict[str, list[str]] = {}
    number = dict.fromkeys(("train", "test1"), 0)
    for split in SPLITS:
        # The official files are train, which has val as a directory, and test1.
        official = "train" if split in DIRECTORIES else "test1"
        folder = root / "images" / official / (str(DIRECTORIES[split]) if split in DIRECTORIES else "")
        folder.mkdir(parents=True)
        in_split = [picture for picture in pictures if picture.job.split == split]
        written = lines.setdefault(official, [])
        # Sets of four consecutive scenes; fewer than four at the end are not used.
        for first in range(0, len(in_split) - 2 * SIDE + 1, 2 * SIDE):
            four = in_split[first : first + 2 * SIDE]
            stem = f"{official}-{number[official]}"
            # Simple sentences are for training only.
            simple = params.simple_pair_sentences if split == "train" else 0
            written += _write_set(four, stem, DIRECTORIES.get(split), params.pair_sentences, simple, folder)
            number[official] += 1
    for official, written in lines.items():
        (root / "data" / f"{official}.json").write_text("".join(written), encoding="utf-8")
    return {"statements": sum(map(len, lines.values()))}


def make_comparisons(
    left: Sequence[Scene], right: Sequence[Scene], number: int, rng: np.random.Generator
) -> Iterator[Comparison]:
    """Yield up to `number` different sentences, each true of one pair in every row and column."""
    # Labels row by row: the two pairs on the diagonal have one label, the other two pairs the other.
    return _draw_fitting(
        left, right, number, lambda: _comparison(rng), lambda a, b, c, d: a is d and b is c and a is not b
    )


def make_simple_comparisons(
    left: Sequence[Scene], right: Sequence[Scene], number: int, rng: np.random.Generator
) -> Iterator[Comparison]:
    """Yield up to `number` different simple sentences, each true of two pairs."""
    return _draw_fitting(left, right, number, lambda: _simple_comparison(rng), lambda *true: sum(true) == SIDE)


def _draw_fitting(
    left: Sequence[Scene],
    right: Sequence[Scene],
    number: int,
    draw: Callable[[], Comparison],
    fits: Callable[[bool, bool, bool, bool], bool],
) -> Iterator[Comparison]:
    """Yield different sentences for which `fits` accepts the labels of the four pairs, row by row."""
    used: set[str] = set()
    # A set may have fewer fitting sentences than are asked for.
    for _ in range(_TRIES):
        if len(used) == number:
            return
        comparison = draw()
        labels = [comparison.is_true_of(left_scene, right_scene) for left_scene in left for right_scene in right]
        if comparison.text not in used and fits(*labels):
            used.add(comparison.text)
            yield comparison


def _write_set(
    four: Sequence[Picture],
    stem: str,
    directory: int | None,
    sentences: int,
    simple: int,
    folder: Path,
) -> Iterator[str]:
    """Yield the lines about one set, and copy its images into `folder`."""
    scenes = [picture.scene for picture in four]
    paths = [picture.job.path for picture in four]
    # Positions in `four`: the first two scenes are left ones, the others right ones.
    pairs = [(left, right) for left in range(SIDE) for right in range(SIDE, 2 * SIDE)]
    for number, pair in enumerate(pairs):
        for side, scene_number in enumerate(pair):
            # As in NLVR2, an image file is named after its pair: `train-0-1-img0.png`.
            shutil.copyfile(paths[scene_number], folder / f"{stem}-{number}-img{side}.png")
    # The first scene's generator draws for the whole set.
    both, rng = (scenes[:SIDE], scenes[SIDE:]), four[0].job.rng(STREAM)
    comparisons = chain(make_comparisons(*both, sentences, rng), make_simple_comparisons(*both, simple, rng))
    for sentence, comparison in enumerate(comparisons):
        for number, (left, right) in enumerate(pairs):
            label = str(comparison.is_true_of(scenes[left], scenes[right]))
            record: dict[str, Any] = {
                "sentence": comparison.text[0].upper() + comparison.text[1:] + ".",
                "left_url": paths[left].name,
                "right_url": paths[right].name,
                "label": label,
                "identifier": f"{stem}-{number}-{sentence}",
                "writer": "0",
                "validation": {"0": label},
                "synset": "scene",
                "query": "scenes",
            }
            # The official train and test files differ in one field.
            if directory is None:
                record["extra_validations"] = {}
            else:
                record["directory"] = directory
            yield json.dumps(record) + "\n"


def _comparison(rng: np.random.Generator) -> Comparison:
    """Draw a sentence without looking at the scenes."""
    description, singular, plural = _draw_object(rng)
    kind = rng.choice(["one", "alike", "same", "all"], p=[0.35, 0.25, 0.2, 0.2])
    if kind == "one":
        text = f"exactly one of the pictures shows {singular}"
        return Comparison(text, description, lambda a, b: bool(a) is not bool(b))
    if kind == "alike":
        text = f"either both pictures show {singular} or neither does"
        return Comparison(text, description, lambda a, b: bool(a) is bool(b))
    if kind == "same":
        return Comparison(f"the pictures show equally many {plural}", description, lambda a, b: a == b)
    total = int(rng.integers(2, 7))
    text = f"together the pictures show {NUMBERS[total]} {plural}"
    return Comparison(text, description, lambda a, b: a + b == total)


def _simple_comparison(rng: np.random.Generator) -> Comparison:
    """Draw a simple sentence without looking at the scenes."""
    description, singular, plural = _draw_object(rng)
    kinds = {
        "left": Comparison(f"the left picture shows {singular}", description, lambda a, b: a > 0),
        "right": Comparison(f"the right picture shows {singular}", description, lambda a, b: b > 0),
        "both": Comparison(f"both pictures show {singular}", description, lambda a, b: a > 0 and b > 0),
        "some": Comparison(f"at least one of the pictures shows {singular}", description, lambda a, b: a + b > 0),
        "more": Comparison(f"the left picture shows more {plural}", description, lambda a, b: a > b),
    }
    return kinds[str(rng.choice(list(kinds)))]


def _draw_object(rng: np.random.Generator) -> tuple[Description, str, str]:
    """Draw a kind of object; return its description, its singular and its plural."""
    shape, color, texture = (str(rng.choice(values)) for values in (SHAPES, COLORS, TEXTURES))
    kind = rng.choice(["shape", "color", "both", "texture"], p=[0.35, 0.25, 0.25, 0.15])
    if kind == "shape":
        return Description(shape=shape), f"a {shape}", f"{shape}s"
    if kind == "color":
        return Description(color=color), f"something {color}", f"{color} objects"
    if kind == "both":
        return Description(shape=shape, color=color), f"a {color} {shape}", f"{color} {shape}s"
    return Description(shape=shape, texture=texture), f"a {texture} {shape}", f"{texture} {shape}s"
