"""Sentences that list what an image of three boxes shows: true by construction, dense, written for pretraining.

A statement of NLVR states one fact and its label is one bit: a model that starts from nothing stays at chance on it
for a long time. A listing names many facts, each of which must be read off the image, so that masked words and words
to come teach colours, shapes, places and counts first (docs/log-nlvr.md). The words are those of the statements.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from vlp_models.synthetic.boxes.scene import BOX, COLOURS, SHAPES, Box, Item, Scene
from vlp_models.synthetic.boxes.words import SIZE_WORDS, Writer, make_writer, plural_of

SLOTS = ("left", "middle", "right")
_WALLS: dict[str, Callable[[Item], bool]] = {
    "the base": lambda i: i.y + i.size >= BOX,
    "the roof": lambda i: i.y <= 0,
    "the left wall": lambda i: i.x <= 0,
    "the right wall": lambda i: i.x + i.size >= BOX,
}


def write_descriptions(rng: random.Random, scene: Scene, order: Sequence[int], number: int) -> list[str]:
    """`number` listings of the scene as drawn with box `order[0]` leftmost."""
    boxes = [scene.boxes[k] for k in order]
    families = _TOWER if scene.kind == "tower" else _SCATTER
    chosen = rng.choices([f for _, f in families], [weight for weight, _ in families], k=number)
    return [family(make_writer(rng, scene), boxes) for family in chosen]


def _contents(w: Writer, boxes: Sequence[Box]) -> str:
    """the left box has two yellow circles a black square and three blue triangles"""
    slot = w.rng.randrange(3)
    kinds = Counter(f"{i.colour} {i.shape}" for i in boxes[slot])
    return f"the {SLOTS[slot]} {w.box} has {_listed(w, kinds, _KINDS)}"


def _sizes(w: Writer, boxes: Sequence[Box]) -> str:
    """the middle box has one small yellow circle and two big black squares"""
    slot = w.rng.randrange(3)
    kinds = Counter(f"{SIZE_WORDS[i.size][0]} {i.colour} {i.shape}" for i in boxes[slot])
    order = [f"{words[0]} {kind}" for words in SIZE_WORDS.values() for kind in _KINDS]
    return f"the {SLOTS[slot]} {w.box} has {_listed(w, kinds, order)}"


def _each_box(w: Writer, boxes: Sequence[Box]) -> str:
    """the boxes have two one and three yellow items; the towers have two one and three blocks"""
    what, test = _some_kind(w)
    counts = [w.number(sum(map(test, box))) if any(map(test, box)) else "no" for box in boxes]
    return f"the {plural_of(w.box)} have {counts[0]} {counts[1]} and {counts[2]} {plural_of(what)}"


def _over_all(w: Writer, boxes: Sequence[Box]) -> str:
    """there are three yellow two black and four blue items; there are five circles and two squares"""
    items = [item for box in boxes for item in box]
    if w.scene.kind == "scatter" and w.chance(0.5):
        return f"there are {_listed(w, Counter(i.shape for i in items), SHAPES)}"
    if w.scene.kind == "scatter" and w.chance(0.5):
        return f"there are {_listed(w, Counter(f'{i.colour} {i.shape}' for i in items), _KINDS)}"
    kinds = Counter(f"{i.colour} {w.item}" for i in items)
    return f"there are {_listed(w, kinds, [f'{colour} {w.item}' for colour in COLOURS])}"


def _who_has(w: Writer, boxes: Sequence[Box]) -> str:
    """two boxes have a yellow circle"""
    what, test = _some_kind(w)
    n = sum(any(map(test, box)) for box in boxes)
    box = w.box if n == 1 else plural_of(w.box)
    return f"{w.number(n) if n else 'no'} {box} {'has' if n == 1 else 'have'} {_a(what)}"


def _at_walls(w: Writer, boxes: Sequence[Box]) -> str:
    """a yellow circle and two black squares are touching the base; in the left box nothing is touching the wall"""
    slot = w.rng.randrange(4)
    items = [item for box in boxes for item in box] if slot == 3 else boxes[slot]
    if w.chance(0.4):
        wall, test = w.one_of("the wall", "the edge"), lambda i: i.gap_to_nearest_wall() <= 0
    else:
        wall, test = w.one_of(*_WALLS.items())
    kinds = Counter(f"{i.colour} {i.shape}" for i in items if test(i))
    where = "" if slot == 3 else f"in the {SLOTS[slot]} {w.box} "
    is_are = "is" if kinds.total() <= 1 else "are"
    return f"{where}{_listed(w, kinds, _KINDS) if kinds else 'nothing'} {is_are} touching {wall}"


def _levels(w: Writer, boxes: Sequence[Box]) -> str:
    """the left tower has three blocks yellow at the base black and blue at the top"""
    slot = w.rng.randrange(3)
    colours = [item.colour for item in boxes[slot]]
    n = len(colours)
    start = f"the {SLOTS[slot]} {w.box} has {w.number(n)} {w.item if n == 1 else plural_of(w.item)} {colours[0]}"
    if n == 1:
        return start
    return f"{start} at the base {''.join(f'{colour} ' for colour in colours[1:-1])}and {colours[-1]} at the top"


def _ends(w: Writer, boxes: Sequence[Box]) -> str:
    """the bases of the towers are yellow black and yellow"""
    part, level = w.one_of(("base", 0), ("top", -1))
    colours = [box[level].colour for box in boxes]
    return f"the {part}s of the {plural_of(w.box)} are {colours[0]} {colours[1]} and {colours[2]}"


def _stacks(w: Writer, boxes: Sequence[Box]) -> str:
    """in the left tower a black block is on a yellow block a blue block is on a black block"""
    high = [slot for slot in range(3) if len(boxes[slot]) > 1]
    if not high:
        return _levels(w, boxes)
    slot = w.rng.choice(high)
    colours = [item.colour for item in boxes[slot]]
    on = w.one_of("on", "above")
    pairs = [f"a {b} {w.item} {on} a {a} {w.item}" for a, b in pairwise(colours)]
    return f"in the {SLOTS[slot]} {w.box} there is {' and '.join(pairs)}"


def _some_kind(w: Writer) -> tuple[str, Callable[[Item], bool]]:
    colour, shape = w.one_of(*COLOURS), w.one_of(*SHAPES)
    roll = w.rng.random()
    if w.scene.kind == "tower":
        return (f"{colour} {w.item}", lambda i: i.colour == colour) if roll < 0.7 else (w.item, lambda i: True)
    if roll < 0.45:
        return f"{colour} {shape}", lambda i: i.colour == colour and i.shape == shape
    if roll < 0.7:
        return f"{colour} {w.item}", lambda i: i.colour == colour
    return (shape, lambda i: i.shape == shape) if roll < 0.9 else (w.item, lambda i: True)


_KINDS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def _listed(w: Writer, kinds: Counter[str], order: Iterable[str]) -> str:
    """`two yellow circles a black square and a blue square`, in a fixed order, without commas: NLVR's have few."""
    parts = []
    for kind in order:
        if n := kinds[kind]:
            parts.append(f"{w.number(n)} {kind if n == 1 else plural_of(kind)}")
    return " ".join([*parts[:-1], "and", parts[-1]]) if len(parts) > 1 else "".join(parts) or "nothing"


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"


_SCATTER: list[tuple[float, Callable[[Writer, Sequence[Box]], str]]] = [
    (5, _contents),
    (1, _sizes),
    (2, _each_box),
    (2, _over_all),
    (1, _who_has),
    (4, _at_walls),
]
_TOWER: list[tuple[float, Callable[[Writer, Sequence[Box]], str]]] = [
    (5, _levels),
    (2, _ends),
    (2, _stacks),
    (2, _each_box),
    (1, _over_all),
    (1, _who_has),
]
