"""What a sentence may say of one box or tower: "two blue items and a circle", "a yellow block at the base".

Each function returns the words that follow "a box with", and their test on a box. Its docstring shows what it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from vlp_models.synthetic.boxes.scene import COLOURS, SHAPES, Box, gap
from vlp_models.synthetic.boxes.words import (
    BoxTest,
    Writer,
    describe,
    exactly,
    noun,
    placed,
    plural_of,
    quantity,
    some,
)

Content = tuple[str, BoxTest]


def content(w: Writer) -> Content:
    table = _TOWER if w.scene.kind == "tower" else _SCATTER
    return w.rng.choices([make for _, make in table], [weight for weight, _ in table])[0](w)


def _count(w: Writer) -> Content:
    """a black circle; exactly two blue items; only one item"""
    box = w.rng.choice(w.scene.boxes)
    what = describe(w, w.rng.choice(box), bare=0.12)
    if w.scene.kind == "scatter" and w.chance(0.15):
        what = placed(w, what)
    how_many = quantity(w, what.count(box))
    return what.after(how_many), lambda b: how_many.test(what.count(b))


def _list(w: Writer) -> Content:
    """a black circle and two squares; 2 yellow and 1 blue item; a blue circle, a black circle and a black square"""
    box = w.rng.choice(w.scene.boxes)
    length = 3 if w.chance(0.25) else 2
    nouns = [describe(w, w.rng.choice(box), bare=0.0) for _ in range(length)]
    all_a = w.chance(0.45)
    parts = [(what, some(w) if all_a else quantity(w, what.count(box))) for what in nouns]
    parts = [(what, how_many) for what, how_many in parts if how_many.words != "no"] or [(nouns[0], some(w))]
    texts = [what.after(how_many) for what, how_many in parts]
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return text, lambda b: all(how_many.test(what.count(b)) for what, how_many in parts)


def _total(w: Writer) -> Content:
    """four items; exactly three objects; a single item"""
    actual = len(w.rng.choice(w.scene.boxes))
    if actual == 1 and w.chance(0.3):
        return f"a single {w.item}", lambda b: len(b) == 1
    how_many = quantity(w, actual)
    if how_many.words in ("a", "no"):
        how_many = exactly(w, actual)
    what = noun(w)
    return what.after(how_many), lambda b: how_many.test(len(b))


def _only_colours(w: Writer) -> Content:
    """only black and yellow items; items of only blue and yellow color; only black blocks"""
    items = plural_of(w.item)
    if w.chance(0.3):
        if w.scene.kind == "scatter" and w.chance(0.4):
            shape = w.one_of(*SHAPES)
            return f"only {shape}s", lambda b: all(i.shape == shape for i in b)
        colour = w.rng.choice(w.scene.items()).colour
        if w.chance(0.3):
            return f"{items} of only {colour} {w.colour}", lambda b: all(i.colour == colour for i in b)
        return f"only {colour} {items}", lambda b: all(i.colour == colour for i in b)
    one, two = w.rng.sample(COLOURS, 2)
    pair = frozenset((one, two))
    n = len(w.rng.choice(w.scene.boxes))
    if w.chance(0.25) and n > 1:
        number = w.number(n)
        text = w.one_of(
            f"{number} {items} of only {one} and {two} {w.colour}",
            f"{number} {items} of {one} and {two} {w.colour}",
            f"only {number} {one} and {two} {items}",
            f"{number} {items} with only {one} and {two} {w.colour}",
        )
        return text, lambda b: len(b) == n and _colours(b) == pair
    text = w.one_of(
        f"only {one} and {two} {items}",
        f"only {one} and {two} {items}",
        f"{items} of only {one} and {two} {w.colour}",
    )
    return text, lambda b: _colours(b) == pair


def _variety(w: Writer) -> Content:
    """4 items of 3 different colors; items of all 3 different colors; three blocks of the same color"""
    box = w.rng.choice(w.scene.boxes)
    items, colours = plural_of(w.item), f"{w.colour}s"
    n, k = len(box), len(_colours(box)) if w.chance(0.7) else w.rng.randint(1, 3)
    counted = w.chance(0.6) and n > 1
    start = f"{w.number(n)} {items}" if counted else items

    def test(b: Box) -> bool:
        return (not counted or len(b) == n) and len(_colours(b)) == k and len(b) > 1

    if k == 1:
        return f"{start} of {w.one_of('the same', 'same')} {w.colour}", test
    if k == 3:
        return w.one_of(
            f"{start} of {w.number(3)} different {colours}",
            f"{start} of all {w.number(3)} different {colours}",
            f"{start} of all {w.number(3)} {colours}",
        ), test
    return f"{start} of {w.number(k)} different {w.one_of(colours, colours, w.colour)}", test


def _of_which(w: Writer) -> Content:
    """4 items of which 2 are black; exactly three objects one of which is a circle; two objects which are black"""
    box = w.rng.choice(w.scene.boxes)
    n = len(box)
    total = w.one_of("", "exactly ") + f"{w.number(n)} {w.item if n == 1 else plural_of(w.item)}"
    what = describe(w, w.rng.choice(box), bare=0.0)
    if w.chance(0.3):
        colour = w.rng.choice(box).colour
        text = f"{total} which {'is' if n == 1 else 'are'} {w.one_of('', 'of ')}{colour}"
        text += f" {w.colour}" if " of " in text.split("which")[1] else ""
        return text, lambda b: len(b) == n and all(i.colour == colour for i in b)
    k = max(1, what.count(box) + w.rng.choice((-1, 0, 0, 0, 1)))
    kind = exactly(w, k) if w.chance(0.8) else quantity(w, k)
    if kind.words in ("no", "a"):
        kind = exactly(w, k)
    if what.singular.endswith(f" {w.item}") and w.chance(0.7):
        rest = what.singular.removesuffix(f" {w.item}")
    else:
        rest = what.plural if kind.plural else f"a {what.singular}"
    text = w.one_of(
        f"{total} of which {kind.words} {kind.is_are} {rest}", f"{total} {kind.words} of which {kind.is_are} {rest}"
    )
    return text, lambda b: len(b) == n and kind.test(what.count(b))


def _only_one(w: Writer) -> Content:
    """only one item that is not black; one item that is blue; only one block and the color is yellow"""
    colour = w.rng.choice([b[0] for b in w.scene.boxes]).colour
    n = w.rng.choices((1, 2, 3), (5, 1, 1))[0]
    items, verb = (w.item, "is") if n == 1 else (plural_of(w.item), "are")
    start = f"{w.one_of('only ', 'exactly ', '')}{w.number(n)} {items}"
    if w.chance(0.3):
        return f"{start} that {verb} not {colour}", lambda b: len(b) == n and all(i.colour != colour for i in b)
    if w.scene.kind == "scatter" and w.chance(0.3):
        shape = w.one_of(*SHAPES)
        rest = f"a {shape}" if n == 1 else f"{shape}s"
        return f"{start} which {verb} {rest}", lambda b: len(b) == n and all(i.shape == shape for i in b)
    end = w.one_of(f"that {verb} {colour}", f"and {'it is' if n == 1 else 'they are'} {colour}")
    if w.chance(0.3):
        end = f"and the {w.colour} is {colour}"
    return f"{start} {end}", lambda b: len(b) == n and all(i.colour == colour for i in b)


def _colours_and(w: Writer) -> Content:
    """items of all 3 different colors and a blue square; only black items and a triangle touching the wall"""
    first, test_first = _variety(w) if w.chance(0.5) else _only_colours(w)
    what = describe(w, bare=0.0)
    if w.scene.kind == "scatter" and w.chance(0.4):
        what = placed(w, what, negated=0.1)
    return f"{first} and {what.after(some(w))}", lambda b: test_first(b) and any(map(what.test, b))


def _near(w: Writer) -> Content:
    """a blue item closely touching a yellow item"""
    one, two = describe(w, bare=0.0), describe(w, bare=0.0)
    words = w.one_of("closely touching", "touching", "near", "close to")
    return f"a {one.singular} {words} a {two.singular}", lambda b: any(
        one.test(i) and two.test(j) and 0 <= gap(i, j) <= 3 for i in b for j in b if i is not j
    )


def _at_level(w: Writer) -> Content:
    """a yellow block at the base; black block at top; blue base; a yellow block in the middle; blue second block"""
    colour = w.rng.choice(w.scene.items()).colour
    words, level = tower_level(w)
    text = f"{w.rng.choices(('a ', '1 ', ''), (10, 2, 1))[0]}{colour} {w.item} {words}"
    if words.startswith(("at", "on")) and w.chance(0.15):
        text = f"a {colour} {w.one_of('base', 'base', 'bottom') if level == 0 else 'top'}"
    return text, lambda b: level_is(b, level, colour)


def tower_level(w: Writer) -> tuple[str, int]:
    """`at the base` and the place it means: 0 is the base, -1 the top, 9 the middle of three."""
    return w.rng.choices(
        [
            ("at the base", 0),
            ("at base", 0),
            ("at the bottom", 0),
            ("at the top", -1),
            ("at top", -1),
            ("on top", -1),
            ("on the top", -1),
            ("in the middle", 9),
            ("as the second level", 1),
            ("touching the wall", 0),
        ],
        (8, 2, 1, 8, 1, 3, 1, 1, 1, 1.5),
    )[0]


def level_is(b: Box, level: int, colour: str) -> bool:
    if level == 9:
        return len(b) == 3 and b[1].colour == colour
    return level < len(b) and b[level].colour == colour


def _two_levels(w: Writer) -> Content:
    """a blue block at the top and a black block at the base; a blue item touching the wall and a black one on top"""
    box = w.rng.choice(w.scene.boxes)
    if len(box) > 1 and w.chance(0.4):
        low, high = box[0].colour, box[1].colour if w.chance(0.7) else w.one_of(*COLOURS)
        it = w.one_of(f"{high} {w.item} on top of it", f"{high} {w.item} on top", f"{high} one right on top of it")
        return (
            f"a {low} {w.item} touching the wall and a {it}",
            lambda b: len(b) > 1 and b[0].colour == low and b[1].colour == high,
        )
    low, high = box[0].colour, box[-1].colour if w.chance(0.7) else w.one_of(*COLOURS)
    text = w.one_of(
        f"a {high} {w.item} at the top and a {low} {w.item} at the base",
        f"a {low} {w.item} at the base and a {high} {w.item} at the top",
        f"a {low} base and a {high} top",
    )
    return text, lambda b: len(b) > 1 and b[0].colour == low and b[-1].colour == high


def _height_and(w: Writer) -> Content:
    """four blocks with a yellow block at the base; 3 items and a blue item on top; three blocks having ..."""
    box = w.rng.choice(w.scene.boxes)
    how_many = quantity(w, len(box), low=2, high=4)
    if how_many.words in ("no", "a"):
        how_many = exactly(w, max(2, len(box)))
    joint = w.one_of("with", "having", "and")
    options: list[Callable[[Writer], Content]] = [_at_level, _at_level, _stacked, _only_colours]
    rest, test = w.rng.choice(options)(w)
    items = plural_of(w.item) if how_many.plural else w.item
    return f"{how_many.words} {items} {joint} {rest}", lambda b: how_many.test(len(b)) and test(b)


def _stacked(w: Writer) -> Content:
    """a black block above a blue block; a blue block on top of black block; a yellow block below a black block"""
    pairs = [(low.colour, high.colour) for b in w.scene.boxes for low, high in pairwise(b)]
    low, high = w.rng.choice(pairs) if pairs and w.chance(0.8) else (w.one_of(*COLOURS), w.one_of(*COLOURS))
    return stacked_words(w, low, high), lambda b: has_stacked(b, low, high)


def stacked_words(w: Writer, low: str, high: str) -> str:
    if w.chance(0.2):
        under = w.one_of("below", "below", "bellow", "beneath", "right beneath")
        return f"a {low} {w.item} {under} a {high} {w.item}"
    over = w.rng.choices(("above", "over", "on", "on top of", "directly on top of"), (8, 5, 6, 1, 0.5))[0]
    return f"a {high} {w.item} {over} a {low} {w.item}"


def has_stacked(b: Box, low: str, high: str) -> bool:
    return any(one.colour == low and two.colour == high for one, two in pairwise(b))


def _run(w: Writer) -> Content:
    """2 blue blocks stacked together; 2 blocks stacked together of the same colour; three attached with each other"""
    n = w.rng.choices((2, 3), (5, 1))[0]
    colour = w.rng.choice(w.scene.items()).colour
    words = w.rng.choices(("stacked together", "attached with each other", "touching each other"), (4, 2, 1))[0]
    items = plural_of(w.item)
    if w.chance(0.15):
        return f"{w.number(n)} {items} {words} of the same {w.colour}", lambda b: any(
            _run_of(b, c) >= n for c in COLOURS
        )
    least = w.one_of("", "", "", "at least ")
    return f"{least}{w.number(n)} {colour} {items} {words}", lambda b: _run_of(b, colour) >= n


def _between(w: Writer) -> Content:
    """a black item between two items of the same color; a yellow block between two blue blocks"""
    triples = [b[i : i + 3] for b in w.scene.boxes for i in range(len(b) - 2)]
    if not triples:
        return _at_level(w)
    below, middle, above = (item.colour for item in w.rng.choice(triples))
    items, words = plural_of(w.item), w.one_of("between", "in between")
    if w.chance(0.5):
        same = f"{words} {w.number(2)} {items} of {w.one_of('the ', '')}same {w.colour}"
        return f"a {middle} {w.item} {same}", lambda b: any(
            b[i].colour == middle and b[i - 1].colour == b[i + 1].colour for i in range(1, len(b) - 1)
        )
    outer = w.one_of(below, above)
    return f"a {middle} {w.item} {words} {w.number(2)} {outer} {items}", lambda b: any(
        b[i].colour == middle and b[i - 1].colour == b[i + 1].colour == outer for i in range(1, len(b) - 1)
    )


def _colours(b: Box) -> frozenset[str]:
    return frozenset(item.colour for item in b)


def _run_of(b: Box, colour: str) -> int:
    best = run = 0
    for item in b:
        run = run + 1 if item.colour == colour else 0
        best = max(best, run)
    return best


_BOTH: list[tuple[float, Callable[[Writer], Content]]] = [
    (9, _count),
    (4, _total),
    (5, _only_colours),
    (4, _variety),
    (4, _of_which),
    (2.5, _only_one),
]
_SCATTER: list[tuple[float, Callable[[Writer], Content]]] = [
    *_BOTH,
    (14, _list),
    (1.5, _colours_and),
    (0.7, _near),
]
_TOWER: list[tuple[float, Callable[[Writer], Content]]] = [
    *_BOTH,
    (4, _list),
    (15, _at_level),
    (2, _two_levels),
    (5, _height_and),
    (7, _stacked),
    (4, _run),
    (1.5, _between),
]
