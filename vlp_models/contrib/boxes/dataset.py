"""Write a synthetic NLVR: scenes of three boxes and sentences that are true or false of them, in the layout of NLVR v1.

Below the directory: `<split>/<split>.json` (JSON lines) and `<split>/images/<n % 80>/<split>-n-m-k.png`, where n is the
group of four scenes, m the scene within its group and k the order of its boxes. Splits are `train`, `val` and `test`.
The reader of the original NLVR reads them too. Four keys are additions: `permutations`, the number of orders drawn (the
original has all six); `number`, the sentence's number within its group; `more`, further sentences about the same images
(the original has one per image); and `descriptions`, for each order, sentences that list the content of that image.

As in NLVR, a group has four scenes: two of them differ from the other two by a rearrangement of the same items or by
one small edit. Every sentence is used with as many scenes it is true of as scenes it is false of, so a sentence alone
never reveals its label.

Descriptions are true by construction and dense. A statement of NLVR is one fact and its label one bit: a model trained
from scratch stays at chance on it for a long time. A description names many facts; each must be read off the image, so
that masked and generated words teach colors, shapes, positions and counts first. It uses the vocabulary of the
statements.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from vlp_models.common.progress import progress_bar
from vlp_models.contrib.boxes.scene import (
    BOX,
    COLORS,
    MAX_ITEMS,
    SHAPES,
    Box,
    Item,
    Scene,
    draw,
    edit,
    rearrange,
    sample,
    structured_rep,
)
from vlp_models.contrib.boxes.sentences import write_sentence
from vlp_models.contrib.boxes.words import SIZE_WORDS, Writer, make_writer, plural_of
from vlp_models.errors import DataError
from vlp_models.params import GeneratorParams

DIRECTORIES = 80  # as in NLVR's training split
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write `params.train`, `val` and `test` examples; return counts of examples, images and statements.

    The same params give the same bytes, and a longer split starts with the shorter one's groups.

    Raises:
        DataError: `permutations` is not between 1 and 6, `statements` is below 1 or `descriptions` below 0.
    """
    if not 1 <= params.permutations <= len(ORDERS):
        raise DataError(f"params.yaml: `permutations` must be 1 to 6, found {params.permutations}")
    if params.statements < 1:
        raise DataError(f"params.yaml: `statements` must be 1 or more, found {params.statements}")
    if params.descriptions < 0:
        raise DataError(f"params.yaml: `descriptions` must be 0 or more, found {params.descriptions}")
    counts = {"examples": 0, "images": 0, "statements": 0}
    for split in ("train", "val", "test"):
        count: int = getattr(params, split)
        if not count:
            continue
        root = directory / split
        lines = []
        # Groups of four scenes; the last one is cut so that the split has exactly `count` examples.
        groups = (count + 3) // 4
        with progress_bar(f"boxes {split}", groups, "groups") as bar:
            for n in range(groups):
                # One generator per group, seeded by its number: a longer split then begins with the groups of a
                # shorter one.
                rng = random.Random(f"{params.seed}/{split}/{n}")
                group = make_group(rng, params.statements, simple=params.simple)
                for m, example in enumerate(group[: count - 4 * n]):
                    # Descriptions name the boxes left, middle and right, so each order of the boxes needs its own.
                    described = [
                        write_descriptions(rng, example.scene, order, params.descriptions)
                        for order in ORDERS[: params.permutations]
                    ]
                    lines.append(json.dumps(_record(n, m, example, described)))
                    images = root / "images" / str(n % DIRECTORIES)
                    images.mkdir(parents=True, exist_ok=True)
                    for k, order in enumerate(ORDERS[: params.permutations]):
                        draw(example.scene, order).save(images / f"{split}-{n}-{m}-{k}.png", compress_level=6)
                    counts["examples"] += 1
                    counts["images"] += params.permutations
                    counts["statements"] += len(example.statements)
                bar.advance()
        (root / f"{split}.json").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return counts


def _record(n: int, m: int, example: Example, described: list[list[str]]) -> dict[str, Any]:
    statements = [
        {"number": number, "sentence": text, "label": "true" if label else "false"}
        for number, text, label in example.statements
    ]
    # NLVR's keys hold the first statement at the top level; further statements follow under `more`.
    return {
        **statements[0],
        "identifier": f"{n}-{m}",
        "directory": str(n % DIRECTORIES),
        "evals": {},
        "structured_rep": structured_rep(example.scene),
        "permutations": len(described),
        "more": statements[1:],
        "descriptions": described,
    }


# Boxes are named by their position in the drawn order, not by their index in the scene.
SLOTS = ("left", "middle", "right")
# Phrase -> whether an item touches that wall; `y` grows downward, so the base is the largest `y`.
_WALLS: dict[str, Callable[[Item], bool]] = {
    "the base": lambda i: i.y + i.size >= BOX,
    "the roof": lambda i: i.y <= 0,
    "the left wall": lambda i: i.x <= 0,
    "the right wall": lambda i: i.x + i.size >= BOX,
}


def write_descriptions(rng: random.Random, scene: Scene, order: Sequence[int], number: int) -> list[str]:
    """Return `number` descriptions of the scene drawn with box `order[0]` leftmost."""
    # Boxes from left to right, as the image in this order shows them.
    boxes = [scene.boxes[k] for k in order]
    families = _TOWER if scene.kind == "tower" else _SCATTER
    drawn_families = rng.choices([f for _, f in families], [weight for weight, _ in families], k=number)
    return [family(make_writer(rng, scene), boxes) for family in drawn_families]


def _contents(w: Writer, boxes: Sequence[Box]) -> str:
    """the left box has two yellow circles a black square and three blue triangles"""
    slot = w.rng.randrange(3)
    # `yellow circle` -> how many items of this kind the box has.
    kinds = Counter(f"{i.color} {i.shape}" for i in boxes[slot])
    return f"the {SLOTS[slot]} {w.box} has {_join_list(w, kinds, _KINDS)}"


def _sizes(w: Writer, boxes: Sequence[Box]) -> str:
    """the middle box has one small yellow circle and two big black squares"""
    # The first word of each size only: a description names one size in one way.
    slot = w.rng.randrange(3)
    kinds = Counter(f"{SIZE_WORDS[i.size][0]} {i.color} {i.shape}" for i in boxes[slot])
    # Every possible kind in a fixed order, small to big: `_join_list` skips the kinds that the box lacks.
    order = [f"{words[0]} {kind}" for words in SIZE_WORDS.values() for kind in _KINDS]
    return f"the {SLOTS[slot]} {w.box} has {_join_list(w, kinds, order)}"


def _each_box(w: Writer, boxes: Sequence[Box]) -> str:
    """the boxes have two one and three yellow items; the towers have two one and three blocks"""
    phrase, test = _some_kind(w)
    # `no` instead of `zero`, as in the statements.
    counts = [w.number(sum(map(test, box))) if any(map(test, box)) else "no" for box in boxes]
    return f"the {plural_of(w.box)} have {counts[0]} {counts[1]} and {counts[2]} {plural_of(phrase)}"


def _over_all(w: Writer, boxes: Sequence[Box]) -> str:
    """there are three yellow two black and four blue items; there are five circles and two squares"""
    items = [item for box in boxes for item in box]
    # Chance 0.5 for shapes, 0.25 for color and shape, 0.25 for colors alone, the only choice for towers.
    if w.scene.kind == "scatter" and w.chance(0.5):
        return f"there are {_join_list(w, Counter(i.shape for i in items), SHAPES)}"
    if w.scene.kind == "scatter" and w.chance(0.5):
        return f"there are {_join_list(w, Counter(f'{i.color} {i.shape}' for i in items), _KINDS)}"
    kinds = Counter(f"{i.color} {w.item}" for i in items)
    return f"there are {_join_list(w, kinds, [f'{color} {w.item}' for color in COLORS])}"


def _who_has(w: Writer, boxes: Sequence[Box]) -> str:
    """two boxes have a yellow circle"""
    phrase, test = _some_kind(w)
    n = sum(any(map(test, box)) for box in boxes)
    box = w.box if n == 1 else plural_of(w.box)
    # The phrase starts with a color, a shape or the item word, so the first letter decides between `a` and `an`.
    article = "an" if phrase[0] in "aeiou" else "a"
    return f"{w.number(n) if n else 'no'} {box} {'has' if n == 1 else 'have'} {article} {phrase}"


def _at_walls(w: Writer, boxes: Sequence[Box]) -> str:
    """a yellow circle and two black squares are touching the base; in the left box nothing is touching the wall"""
    slot = w.rng.randrange(4)
    # Slot 3 is the whole image: the sentence then names no box.
    items = [item for box in boxes for item in box] if slot == 3 else boxes[slot]
    if w.chance(0.4):
        wall, test = w.one_of("the wall", "the edge"), lambda i: i.gap_to_nearest_wall() <= 0
    else:
        wall, test = w.one_of(*_WALLS.items())
    kinds = Counter(f"{i.color} {i.shape}" for i in items if test(i))
    where = "" if slot == 3 else f"in the {SLOTS[slot]} {w.box} "
    # An empty counter reads `nothing is`.
    is_are = "is" if kinds.total() <= 1 else "are"
    return f"{where}{_join_list(w, kinds, _KINDS) if kinds else 'nothing'} {is_are} touching {wall}"


def _levels(w: Writer, boxes: Sequence[Box]) -> str:
    """the left tower has three blocks yellow at the base black and blue at the top"""
    slot = w.rng.randrange(3)
    colors = [item.color for item in boxes[slot]]
    n = len(colors)
    start = f"the {SLOTS[slot]} {w.box} has {w.number(n)} {w.item if n == 1 else plural_of(w.item)} {colors[0]}"
    if n == 1:
        return start
    # Base first: the middle levels are listed without a word between them.
    return f"{start} at the base {''.join(f'{color} ' for color in colors[1:-1])}and {colors[-1]} at the top"


def _ends(w: Writer, boxes: Sequence[Box]) -> str:
    """the bases of the towers are yellow black and yellow"""
    part, level = w.one_of(("base", 0), ("top", -1))
    colors = [box[level].color for box in boxes]
    return f"the {part}s of the {plural_of(w.box)} are {colors[0]} {colors[1]} and {colors[2]}"


def _stacks(w: Writer, boxes: Sequence[Box]) -> str:
    """in the left tower a black block is on a yellow block a blue block is on a black block"""
    # Only a tower of two blocks or more has a block on another; otherwise describe its levels.
    high = [slot for slot in range(3) if len(boxes[slot]) > 1]
    if not high:
        return _levels(w, boxes)
    slot = w.rng.choice(high)
    colors = [item.color for item in boxes[slot]]
    on = w.one_of("on", "above")
    # `pairwise` goes from the base upward: `b` is the block on `a`.
    pairs = [f"a {b} {w.item} {on} a {a} {w.item}" for a, b in pairwise(colors)]
    return f"in the {SLOTS[slot]} {w.box} there is {' and '.join(pairs)}"


def _some_kind(w: Writer) -> tuple[str, Callable[[Item], bool]]:
    color, shape = w.one_of(*COLORS), w.one_of(*SHAPES)
    roll = w.rng.random()
    # All blocks of a tower are squares: only a color, or any block, distinguishes them.
    if w.scene.kind == "tower":
        return (f"{color} {w.item}", lambda i: i.color == color) if roll < 0.7 else (w.item, lambda i: True)
    if roll < 0.45:
        return f"{color} {shape}", lambda i: i.color == color and i.shape == shape
    if roll < 0.7:
        return f"{color} {w.item}", lambda i: i.color == color
    return (shape, lambda i: i.shape == shape) if roll < 0.9 else (w.item, lambda i: True)


_KINDS = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)


def _join_list(w: Writer, kinds: Counter[str], order: Iterable[str]) -> str:
    """Return `two yellow circles a black square and a blue square`: in a fixed order and without commas."""
    parts = []
    # Follow `order`, not the counter: the same content always gives the same sentence.
    for kind in order:
        if n := kinds[kind]:
            parts.append(f"{w.number(n)} {kind if n == 1 else plural_of(kind)}")
    return " ".join([*parts[:-1], "and", parts[-1]]) if len(parts) > 1 else "".join(parts) or "nothing"


# Weight -> family of sentences for scattered boxes.
_SCATTER: list[tuple[float, Callable[[Writer, Sequence[Box]], str]]] = [
    (5, _contents),
    (1, _sizes),
    (2, _each_box),
    (2, _over_all),
    (1, _who_has),
    (4, _at_walls),
]
# Weight -> family of sentences for towers.
_TOWER: list[tuple[float, Callable[[Writer, Sequence[Box]], str]]] = [
    (5, _levels),
    (2, _ends),
    (2, _stacks),
    (2, _each_box),
    (1, _over_all),
    (1, _who_has),
]

SIMPLE_ITEMS = 2


_TRIES = 60  # sentences tried per requested one before the group is discarded


@dataclass
class Example:
    """A scene and its statements: (number of the sentence within its group, text, label)."""

    scene: Scene
    statements: list[tuple[int, str, bool]] = field(default_factory=list)


def make_group(rng: random.Random, statements: int, *, simple: bool = False) -> list[Example]:
    """Return four scenes with about `statements` labeled sentences each, at least one and never more.

    `simple`: few items per box, one fact per sentence.
    """
    while True:
        max_items = SIMPLE_ITEMS if simple else MAX_ITEMS
        # 47% of the groups are of towers.
        kind: Literal["tower", "scatter"] = "tower" if rng.random() < 0.47 else "scatter"
        scenes = [sample(rng, kind, max_items) for _ in range(2)]
        for scene in scenes[:2]:  # the other two differ from these
            change = edit if rng.random() < 0.6 else rearrange
            scenes.append(change(rng, scene, max_items))
        group = [Example(scene) for scene in scenes]
        # `number` identifies the sentence in the group: scenes that share a sentence record the same number.
        for number in range(_TRIES * statements):
            # A sentence needs one scene it is true of and one it is false of.
            open_ = [example for example in group if len(example.statements) < statements]
            if len(open_) < 2:
                break
            _add_sentence(rng, number, open_, simple)
        # A scene without any statement would be an example without a label: discard the group and draw again.
        if all(example.statements for example in group):
            return group


def _add_sentence(rng: random.Random, number: int, examples: list[Example], simple: bool) -> None:
    """Add a sentence to as many scenes it is true of as it is false of, first to those with the fewest sentences."""
    sentence = write_sentence(rng, rng.choice(examples).scene, simple=simple)
    # Shuffle first: the sort is stable, so ties between equally short lists are broken at random.
    rng.shuffle(examples)
    examples.sort(key=lambda example: len(example.statements))
    labels = [(example, sentence.test(example.scene)) for example in examples]
    true = [example for example, label in labels if label]
    false = [example for example, label in labels if not label]
    # `zip` stops at the shorter list, so the sentence gets as many true as false labels and reveals nothing by
    # itself.
    for with_true, with_false in zip(true, false, strict=False):
        with_true.statements.append((number, sentence.text, True))
        with_false.statements.append((number, sentence.text, False))
