"""Statements of NLVR2's form about pairs of scenes, in the layout of its files: `nlvr2/data` and `nlvr2/images`.

Four scenes make a set: two left pictures and two right ones, so four pairs. A sentence is said of all four, and with
each picture it is once true and once false. So neither the words alone nor the words and one of the pictures tell
anything; what counts is how the two compare.

Nothing but pairs of such sentences is hard to begin with: as long as a model knows neither picture, no answer is better
than another. In train alone there may be first lessons besides, which one picture, or each by itself, can tell. Of
these, too, two of a set's four pairs are true, so that words alone tell nothing.

As in the genuine files, val is a directory of train (`VALIDATION`), test is test1, and each pair has two image files of
its own: a scene is in two of them.
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

from vlp_models.synthetic.scenes.language import NUMBERS, Description
from vlp_models.synthetic.scenes.scene import COLOURS, SHAPES, TEXTURES, Scene

DIRECTORIES = {"train": 0, "val": 1}  # of the official train
VALIDATION = str(DIRECTORIES["val"])  # `validation_directories` of a dataset that reads these files
SIDE = 2  # left pictures, and right ones, of a set
_TRIES = 400


@dataclass(frozen=True)
class Comparison:
    """A sentence about how many there are of something in two scenes; counts: of the left one, of the right one."""

    text: str
    what: Description
    of_counts: Callable[[int, int], bool]

    def holds(self, left: Scene, right: Scene) -> bool:
        return self.of_counts(len(self.what.among(left)), len(self.what.among(right)))


def write_pairs(
    pictures: Sequence[tuple[Scene, np.random.Generator, Path]],
    sentences: int,
    splits: Sequence[str],
    directory: Path,
    lessons: int = 0,
) -> int:
    """Writes the files of NLVR2's form below `directory`/nlvr2; returns how many statements there are.

    Args:
        pictures: scene, random numbers, image file.
        sentences: at most so many about a set.
        lessons: likewise, besides, in train.
    """
    root = directory / "nlvr2"
    (root / "data").mkdir(parents=True)
    lines: dict[str, list[str]] = {}
    number = dict.fromkeys(("train", "test1"), 0)
    for split in splits:
        official = "train" if split in DIRECTORIES else "test1"
        folder = root / "images" / official / (str(DIRECTORIES[split]) if split in DIRECTORIES else "")
        folder.mkdir(parents=True)
        of_split = [picture for picture in pictures if picture[0].split == split]
        written = lines.setdefault(official, [])
        for first in range(0, len(of_split) - 2 * SIDE + 1, 2 * SIDE):
            four = of_split[first : first + 2 * SIDE]
            stem = f"{official}-{number[official]}"
            first_lessons = lessons if split == "train" else 0
            written += _set(four, stem, DIRECTORIES.get(split), sentences, first_lessons, folder)
            number[official] += 1
    for official, written in lines.items():
        (root / "data" / f"{official}.json").write_text("".join(written), encoding="utf-8")
    return sum(map(len, lines.values()))


def compare(
    left: Sequence[Scene], right: Sequence[Scene], number: int, rng: np.random.Generator
) -> Iterator[Comparison]:
    """Up to `number` different sentences, each true of one pair in every row and column."""
    return _drawn(left, right, number, lambda: _comparison(rng), lambda a, b, c, d: a is d and b is c and a is not b)


def teach(left: Sequence[Scene], right: Sequence[Scene], number: int, rng: np.random.Generator) -> Iterator[Comparison]:
    """Up to `number` different first lessons, each true of two pairs."""
    return _drawn(left, right, number, lambda: _lesson(rng), lambda *true: sum(true) == SIDE)


def _drawn(
    left: Sequence[Scene],
    right: Sequence[Scene],
    number: int,
    draw: Callable[[], Comparison],
    fits: Callable[[bool, bool, bool, bool], bool],
) -> Iterator[Comparison]:
    """fits: of whether a sentence is true of the pairs, row by row."""
    said: set[str] = set()
    for _ in range(_TRIES):
        if len(said) == number:
            return
        comparison = draw()
        (a, b), (c, d) = [[comparison.holds(one, other) for other in right] for one in left]
        if comparison.text not in said and fits(a, b, c, d):
            said.add(comparison.text)
            yield comparison


def _set(
    four: Sequence[tuple[Scene, np.random.Generator, Path]],
    stem: str,
    directory: int | None,
    sentences: int,
    lessons: int,
    folder: Path,
) -> Iterator[str]:
    """The lines about one set, whose pictures are copied into `folder`."""
    scenes = [scene for scene, _, _ in four]
    paths = [path for _, _, path in four]
    pairs = [(left, right) for left in range(SIDE) for right in range(SIDE, 2 * SIDE)]
    for number, pair in enumerate(pairs):
        for side, place in enumerate(pair):
            shutil.copyfile(paths[place], folder / f"{stem}-{number}-img{side}.png")
    both, rng = (scenes[:SIDE], scenes[SIDE:]), four[0][1]
    said = chain(compare(*both, sentences, rng), teach(*both, lessons, rng))
    for sentence, comparison in enumerate(said):
        for number, (left, right) in enumerate(pairs):
            label = str(comparison.holds(scenes[left], scenes[right]))
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
            own: dict[str, Any] = {"extra_validations": {}} if directory is None else {"directory": directory}
            yield json.dumps(record | own) + "\n"


def _comparison(rng: np.random.Generator) -> Comparison:
    """One drawn without a look at any scene."""
    what, one, many = _thing(rng)
    kind = rng.choice(["one", "alike", "same", "all"], p=[0.35, 0.25, 0.2, 0.2])
    if kind == "one":
        return Comparison(f"exactly one of the pictures shows {one}", what, lambda a, b: bool(a) is not bool(b))
    if kind == "alike":
        text = f"either both pictures show {one} or neither does"
        return Comparison(text, what, lambda a, b: bool(a) is bool(b))
    if kind == "same":
        return Comparison(f"the pictures show equally many {many}", what, lambda a, b: a == b)
    total = int(rng.integers(2, 7))
    return Comparison(f"together the pictures show {NUMBERS[total]} {many}", what, lambda a, b: a + b == total)


def _lesson(rng: np.random.Generator) -> Comparison:
    """One drawn without a look at any scene."""
    what, one, many = _thing(rng)
    kinds = {
        "left": Comparison(f"the left picture shows {one}", what, lambda a, b: a > 0),
        "right": Comparison(f"the right picture shows {one}", what, lambda a, b: b > 0),
        "both": Comparison(f"both pictures show {one}", what, lambda a, b: a > 0 and b > 0),
        "some": Comparison(f"at least one of the pictures shows {one}", what, lambda a, b: a + b > 0),
        "more": Comparison(f"the left picture shows more {many}", what, lambda a, b: a > b),
    }
    return kinds[str(rng.choice(list(kinds)))]


def _thing(rng: np.random.Generator) -> tuple[Description, str, str]:
    """A kind of object, and its name for one and for several."""
    shape, colour, texture = (str(rng.choice(values)) for values in (SHAPES, COLOURS, TEXTURES))
    kind = rng.choice(["shape", "colour", "both", "texture"], p=[0.35, 0.25, 0.25, 0.15])
    if kind == "shape":
        return Description(shape=shape), f"a {shape}", f"{shape}s"
    if kind == "colour":
        return Description(colour=colour), f"something {colour}", f"{colour} objects"
    if kind == "both":
        return Description(shape=shape, colour=colour), f"a {colour} {shape}", f"{colour} {shape}s"
    return Description(shape=shape, texture=texture), f"a {texture} {shape}", f"{texture} {shape}s"
