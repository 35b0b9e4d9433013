"""Building blocks of NLVR's sentences: a writer's habits, quantities, noun phrases, positions.

Each phrase has its meaning as a test on the scene's structure. The meanings were checked against the labels of NLVR's
training sentences: a bare number is exact ("there are 2 yellow circles", "there are 2 boxes with"), `on` and `above`
mean the next block, `only black and yellow` requires both colors, `closely touching` allows a gap of a few pixels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vlp_models.contrib.boxes.scene import BOX, COLORS, SHAPES, Box, Item, Scene

T = TypeVar("T")
ItemTest = Callable[[Item], bool]
BoxTest = Callable[[Box], bool]
SceneTest = Callable[[Scene], bool]

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SIZE_WORDS = {10: ("small",), 20: ("medium", "medium sized"), 30: ("big", "large")}
CLOSE = 4  # maximum gap in pixels of "closely touching"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One annotator's habits, which stay the same within a sentence, and the scene that the sentence is about."""

    rng: random.Random
    scene: Scene  # phrases are mostly drawn from its content
    digits: bool
    item: str  # the writer's word: item, object or block
    box: str  # the writer's word: box, grey box, tower, ...; plain-ok
    color: str  # the writer's spelling: color or colour, plain-ok

    def one_of(self, *options: T) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, n: int) -> str:
        return str(n) if self.digits or n >= len(NUMBERS) else NUMBERS[n]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """`words` before the noun ("at least two"); `plural`: the noun is in the plural."""

    words: str
    plural: bool
    test: Callable[[int], bool]

    @property
    def is_are(self) -> str:
        return "are" if self.plural else "is"


@dataclass(frozen=True, kw_only=True)
class Noun:
    singular: str
    plural: str
    test: ItemTest

    def after(self, quantity: Quantity) -> str:
        text = self.plural if quantity.plural else self.singular
        # The article depends on the first letter of the phrase, which may be an adjective.
        if quantity.words == "a" and text[0] in "aeiou":
            return f"an {text}"
        return f"{quantity.words} {text}"

    def count(self, box: Sequence[Item]) -> int:
        return sum(map(self.test, box))


def make_writer(rng: random.Random, scene: Scene) -> Writer:
    # Towers are mostly called towers of blocks; a writer who calls them boxes prefers `item`.
    tower = scene.kind == "tower"
    if tower:
        box = rng.choices(("tower", "box"), (4, 1))[0]
        item = rng.choices(("block", "item"), (12, 1))[0] if box == "tower" else rng.choice(("item", "item", "block"))
    else:
        box = rng.choices(("box", "grey box", "grey square", "square"), (14, 3, 2, 1))[0]  # plain-ok
        item = rng.choice(("item", "item", "object"))
    return Writer(
        rng=rng,
        scene=scene,
        digits=rng.random() < 0.4,
        item=item,
        box=box,
        color=rng.choice(("color", "colour")),  # plain-ok
    )


def exactly(w: Writer, n: int) -> Quantity:
    """Return a bare number, which NLVR's writers mean exactly."""
    return Quantity(words=w.number(n), plural=n != 1, test=lambda k: k == n)


def some(w: Writer) -> Quantity:
    words = w.rng.choices(("a", "at least one", "atleast one"), (20, 4, 0.3))[0]
    return Quantity(words=words, plural=False, test=lambda k: k >= 1)


def quantity(w: Writer, actual: int, *, low: int = 1, high: int = 8) -> Quantity:
    """Return a quantity near `actual`, so that it is about as often true as false."""
    # Off by one in four of nine cases, within the range that the caller finds plausible.
    n = max(low, min(high, actual + w.rng.choices((-1, 0, 1), (2, 5, 2))[0]))
    kind = w.rng.choices(_KINDS, _KIND_WEIGHTS)[0]
    # `no` is false of this scene: keep it for counts near zero, where it is sometimes true.
    if kind == "no" and actual > 2:
        kind = "exactly"
    if kind == "no":
        return Quantity(words="no", plural=False, test=lambda k: k == 0)
    if kind == "a":
        return some(w)
    number, plural = w.number(n), n != 1
    if kind == "at least":
        words = w.one_of("at least", "at least", "at least", "atleast")
        return Quantity(words=f"{words} {number}", plural=plural, test=lambda k: k >= n)
    if kind == "at most":
        return Quantity(words=f"at most {number}", plural=plural, test=lambda k: k <= n)
    if kind == "more":
        return Quantity(words=f"more than {number}", plural=plural, test=lambda k: k > n)
    if kind == "less":
        # `less than one` means `no`, which is a kind of its own.
        n = max(n, 2)
        return Quantity(words=f"less than {w.number(n)}", plural=True, test=lambda k: k < n)
    prefix = w.rng.choices(("", "exactly ", "only ", "just "), (10, 8, 3, 0.5))[0]
    return Quantity(words=prefix + number, plural=plural, test=lambda k: k == n)


_KINDS = ("exactly", "a", "at least", "at most", "more", "less", "no")
_KIND_WEIGHTS = (10, 8, 4, 0.6, 0.7, 0.4, 1)


def describe(w: Writer, item: Item | None = None, *, bare: float = 0.05) -> Noun:
    """Return a noun phrase with color, shape and size, mostly true of `item`.

    bare: probability that it names nothing ("item").
    """
    item = item or w.rng.choice(w.scene.items())
    # 15% of the colors and shapes are random, so that the phrase also names what the scene lacks.
    color = item.color if w.chance(0.85) else w.one_of(*COLORS)
    if w.scene.kind == "tower":
        return noun(w, color=None if w.chance(bare) else color)
    shape = item.shape if w.chance(0.85) else w.one_of(*SHAPES)
    roll = w.rng.random()
    if roll < bare:
        return noun(w)
    size = item.size if w.chance(0.06) else None
    if roll < 0.55:
        return noun(w, color=color, shape=shape, size=size)
    if roll < 0.82:
        return noun(w, color=color, size=size)
    return noun(w, shape=shape, size=size)


def noun(w: Writer, *, color: str | None = None, shape: str | None = None, size: int | None = None) -> Noun:
    words = [w.one_of(*SIZE_WORDS[size])] if size else []
    # Adjectives in English order: size, color, then the noun.
    words += [color] if color else []
    start = "".join(f"{word} " for word in words)
    head = shape or w.item

    def test(item: Item) -> bool:
        # An attribute that the phrase does not name does not restrict the test.
        return (
            (color is None or item.color == color)
            and (shape is None or item.shape == shape)
            and (size is None or item.size == size)
        )

    return Noun(singular=start + head, plural=f"{start}{head}s", test=test)


def place(w: Writer) -> tuple[str, ItemTest]:
    """Return a phrase such as `touching the wall`, and its test on an item."""
    # `slack` is the gap in pixels that still counts as touching: 0 for `touching`.
    slack = CLOSE if w.chance(0.35) else 0
    touching = w.one_of("closely touching", "closely touching", "nearly touching") if slack else "touching"
    if not slack and w.chance(0.05):
        touching = "attached to"
    of_box = w.one_of("", "", " of a box", " of the box")
    # (weight, names of the same wall, test); `y` grows downward, so the base is at `BOX`.
    options: list[tuple[float, tuple[str, ...], ItemTest]] = [
        (
            9,
            ("the wall", "the edge", "the edge", "any edge", "the side", "a wall", "an edge"),
            lambda i: i.gap_to_nearest_wall() <= slack,
        ),
        (6, ("the base", "the bottom", "the bottom base"), lambda i: BOX - i.y - i.size <= slack),
        (1, ("the roof", "the top"), lambda i: i.y <= slack),
        (2, ("right wall", "the right wall", "the right edge"), lambda i: BOX - i.x - i.size <= slack),
        (0.7, ("left wall", "the left wall"), lambda i: i.x <= slack),
        (
            3,
            ("a corner", "the corner"),
            lambda i: min(i.x, BOX - i.x - i.size) <= slack and min(i.y, BOX - i.y - i.size) <= slack,
        ),
        (
            0.7,
            ("the bottom right corner", "bottom-right corner"),
            lambda i: BOX - i.x - i.size <= slack and BOX - i.y - i.size <= slack,
        ),
    ]
    _, words, test = w.rng.choices(options, [weight for weight, _, _ in options])[0]
    text = w.rng.choice(words)
    # These names do not take `of the box`.
    if text not in ("any edge", "an edge", "the bottom base"):
        text += of_box
    return f"{touching} {text}", test


def placed(w: Writer, base: Noun, *, negated: float = 0.25) -> Noun:
    """Return `base` at a wall, a corner or the bottom; or not there."""
    words, at = place(w)
    if w.chance(negated):
        return Noun(
            singular=f"{base.singular} not {words}",
            plural=f"{base.plural} not {words}",
            test=lambda item: base.test(item) and not at(item),
        )
    return Noun(
        singular=f"{base.singular} {words}",
        plural=f"{base.plural} {words}",
        test=lambda item: base.test(item) and at(item),
    )


def plural_of(word: str) -> str:
    return f"{word}es" if word.endswith("x") else f"{word}s"
