"""Phrases about one box or tower: "two blue items and a circle", "a yellow block at the base".

Each function returns the text after "a box with" and a test of it on a box; its docstring shows examples of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from vlp_models.contrib.boxes.scene import COLORS, SHAPES, Box, gap
from vlp_models.contrib.boxes.words import (
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
    """Draw a phrase that fits the kind of scene."""
    table = _TOWER if w.scene.kind == "tower" else _SCATTER
    # (weight, function) pairs: draw one function by weight and call it.
    return w.rng.choices([make for _, make in table], [weight for weight, _ in table])[0](w)


def _count(w: Writer) -> Content:
    """a black circle; exactly two blue items; only one item"""
    # Draw from an existing box, so that the phrase is true of at least some box more often than by chance.
    box = w.rng.choice(w.scene.boxes)
    phrase = describe(w, w.rng.choice(box), bare=0.12)
    if w.scene.kind == "scatter" and w.chance(0.15):
        phrase = placed(w, phrase)
    how_many = quantity(w, phrase.count(box))
    return phrase.after(how_many), lambda b: how_many.test(phrase.count(b))


def _list(w: Writer) -> Content:
    """a black circle and two squares; 2 yellow and 1 blue item; a blue circle, a black circle and a black square"""
    box = w.rng.choice(w.scene.boxes)
    length = 3 if w.chance(0.25) else 2
    nouns = [describe(w, w.rng.choice(box), bare=0.0) for _ in range(length)]
    all_a = w.chance(0.45)
    parts = [(phrase, some(w) if all_a else quantity(w, phrase.count(box))) for phrase in nouns]
    # `a box with no circle and two squares` is not how writers put it; if every part is dropped, one noun remains.
    parts = [(phrase, how_many) for phrase, how_many in parts if how_many.words != "no"] or [(nouns[0], some(w))]
    texts = [phrase.after(how_many) for phrase, how_many in parts]
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return text, lambda b: all(how_many.test(phrase.count(b)) for phrase, how_many in parts)


def _total(w: Writer) -> Content:
    """four items; exactly three objects; a single item"""
    actual = len(w.rng.choice(w.scene.boxes))
    if actual == 1 and w.chance(0.3):
        return f"a single {w.item}", lambda b: len(b) == 1
    how_many = quantity(w, actual)
    # `a` and `no` name no total: replace them by the bare number.
    if how_many.words in ("a", "no"):
        how_many = exactly(w, actual)
    phrase = noun(w)
    return phrase.after(how_many), lambda b: how_many.test(len(b))


def _only_colors(w: Writer) -> Content:
    """only black and yellow items; items of only blue and yellow color; only black blocks"""
    items = plural_of(w.item)
    if w.chance(0.3):
        if w.scene.kind == "scatter" and w.chance(0.4):
            shape = w.one_of(*SHAPES)
            return f"only {shape}s", lambda b: all(i.shape == shape for i in b)
        color = w.rng.choice(w.scene.items()).color
        if w.chance(0.3):
            return f"{items} of only {color} {w.color}", lambda b: all(i.color == color for i in b)
        return f"only {color} {items}", lambda b: all(i.color == color for i in b)
    first, second = w.rng.sample(COLORS, 2)
    # Both colors are required: `only black and yellow` is false of an all-black box, as NLVR's writers mean it.
    pair = frozenset((first, second))
    n = len(w.rng.choice(w.scene.boxes))
    if w.chance(0.25) and n > 1:
        number = w.number(n)
        text = w.one_of(
            f"{number} {items} of only {first} and {second} {w.color}",
            f"{number} {items} of {first} and {second} {w.color}",
            f"only {number} {first} and {second} {items}",
            f"{number} {items} with only {first} and {second} {w.color}",
        )
        return text, lambda b: len(b) == n and _colors(b) == pair
    text = w.one_of(
        f"only {first} and {second} {items}",
        f"only {first} and {second} {items}",
        f"{items} of only {first} and {second} {w.color}",
    )
    return text, lambda b: _colors(b) == pair


def _variety(w: Writer) -> Content:
    """4 items of 3 different colors; items of all 3 different colors; three blocks of the same color"""
    box = w.rng.choice(w.scene.boxes)
    items, colors = plural_of(w.item), f"{w.color}s"
    # True of the drawn box in most cases; a random number of colors makes the sentence false often enough.
    n, k = len(box), len(_colors(box)) if w.chance(0.7) else w.rng.randint(1, 3)
    counted = w.chance(0.6) and n > 1
    start = f"{w.number(n)} {items}" if counted else items

    def test(b: Box) -> bool:
        # One item has no variety: a box with a single item is never of `the same color`.
        return (not counted or len(b) == n) and len(_colors(b)) == k and len(b) > 1

    if k == 1:
        return f"{start} of {w.one_of('the same', 'same')} {w.color}", test
    if k == 3:
        return w.one_of(
            f"{start} of {w.number(3)} different {colors}",
            f"{start} of all {w.number(3)} different {colors}",
            f"{start} of all {w.number(3)} {colors}",
        ), test
    return f"{start} of {w.number(k)} different {w.one_of(colors, colors, w.color)}", test


def _of_which(w: Writer) -> Content:
    """4 items of which 2 are black; exactly three objects one of which is a circle; two objects which are black"""
    box = w.rng.choice(w.scene.boxes)
    n = len(box)
    total = w.one_of("", "exactly ") + f"{w.number(n)} {w.item if n == 1 else plural_of(w.item)}"
    phrase = describe(w, w.rng.choice(box), bare=0.0)
    if w.chance(0.3):
        color = w.rng.choice(box).color
        text = f"{total} which {'is' if n == 1 else 'are'} {w.one_of('', 'of ')}{color}"
        # `which are of blue` lacks its noun: make it `which are of blue color`.
        text += f" {w.color}" if " of " in text.split("which")[1] else ""
        return text, lambda b: len(b) == n and all(i.color == color for i in b)
    # At least 1, and off by one in two of five cases, so that the sentence is false about as often as true.
    k = max(1, phrase.count(box) + w.rng.choice((-1, 0, 0, 0, 1)))
    kind = exactly(w, k) if w.chance(0.8) else quantity(w, k)
    if kind.words in ("no", "a"):
        kind = exactly(w, k)
    # `of which 2 are black` instead of `of which 2 are black items`.
    if phrase.singular.endswith(f" {w.item}") and w.chance(0.7):
        rest = phrase.singular.removesuffix(f" {w.item}")
    else:
        rest = phrase.plural if kind.plural else f"a {phrase.singular}"
    text = w.one_of(
        f"{total} of which {kind.words} {kind.is_are} {rest}", f"{total} {kind.words} of which {kind.is_are} {rest}"
    )
    return text, lambda b: len(b) == n and kind.test(phrase.count(b))


def _only_one(w: Writer) -> Content:
    """only one item that is not black; one item that is blue; only one block and the color is yellow"""
    # The first item, in a tower the base, gives the color.
    color = w.rng.choice([b[0] for b in w.scene.boxes]).color
    n = w.rng.choices((1, 2, 3), (5, 1, 1))[0]
    items, verb = (w.item, "is") if n == 1 else (plural_of(w.item), "are")
    # The three starts mean the same: NLVR's writers mean a bare number exactly.
    start = f"{w.one_of('only ', 'exactly ', '')}{w.number(n)} {items}"
    if w.chance(0.3):
        return f"{start} that {verb} not {color}", lambda b: len(b) == n and all(i.color != color for i in b)
    if w.scene.kind == "scatter" and w.chance(0.3):
        shape = w.one_of(*SHAPES)
        rest = f"a {shape}" if n == 1 else f"{shape}s"
        return f"{start} which {verb} {rest}", lambda b: len(b) == n and all(i.shape == shape for i in b)
    end = w.one_of(f"that {verb} {color}", f"and {'it is' if n == 1 else 'they are'} {color}")
    if w.chance(0.3):
        end = f"and the {w.color} is {color}"
    return f"{start} {end}", lambda b: len(b) == n and all(i.color == color for i in b)


def _colors_and(w: Writer) -> Content:
    """items of all 3 different colors and a blue square; only black items and a triangle touching the wall"""
    first, test_first = _variety(w) if w.chance(0.5) else _only_colors(w)
    phrase = describe(w, bare=0.0)
    if w.scene.kind == "scatter" and w.chance(0.4):
        # Both parts must hold for the same box.
        phrase = placed(w, phrase, negated=0.1)
    return f"{first} and {phrase.after(some(w))}", lambda b: test_first(b) and any(map(phrase.test, b))


def _near(w: Writer) -> Content:
    """a blue item closely touching a yellow item"""
    first, second = describe(w, bare=0.0), describe(w, bare=0.0)
    words = w.one_of("closely touching", "touching", "near", "close to")
    # A gap of 0 to 3 pixels counts as touching; `i is not j` keeps an item from touching itself.
    return f"a {first.singular} {words} a {second.singular}", lambda b: any(
        first.test(i) and second.test(j) and 0 <= gap(i, j) <= 3 for i in b for j in b if i is not j
    )


def _at_level(w: Writer) -> Content:
    """a yellow block at the base; black block at top; blue base; a yellow block in the middle; blue second block"""
    color = w.rng.choice(w.scene.items()).color
    words, level = tower_level(w)
    text = f"{w.rng.choices(('a ', '1 ', ''), (10, 2, 1))[0]}{color} {w.item} {words}"
    # `a yellow base` replaces the longer phrase where the level is an end of the tower.
    if words.startswith(("at", "on")) and w.chance(0.15):
        text = f"a {color} {w.one_of('base', 'base', 'bottom') if level == 0 else 'top'}"
    return text, lambda b: level_is(b, level, color)


def tower_level(w: Writer) -> tuple[str, int]:
    """Return a phrase such as `at the base` and its level: 0 is the base, -1 the top, 9 the middle of three."""
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


def level_is(b: Box, level: int, color: str) -> bool:
    # Only a tower of three has one middle block.
    if level == 9:
        return len(b) == 3 and b[1].color == color
    # `level < len(b)` is always true of -1, the top, since no box of a tower is empty.
    return level < len(b) and b[level].color == color


def _two_levels(w: Writer) -> Content:
    """a blue block at the top and a black block at the base; a blue item touching the wall and a black one on top"""
    box = w.rng.choice(w.scene.boxes)
    # Two neighboring levels at the bottom; otherwise the two ends of a tower.
    if len(box) > 1 and w.chance(0.4):
        low, high = box[0].color, box[1].color if w.chance(0.7) else w.one_of(*COLORS)
        it = w.one_of(f"{high} {w.item} on top of it", f"{high} {w.item} on top", f"{high} one right on top of it")
        return (
            f"a {low} {w.item} touching the wall and a {it}",
            lambda b: len(b) > 1 and b[0].color == low and b[1].color == high,
        )
    low, high = box[0].color, box[-1].color if w.chance(0.7) else w.one_of(*COLORS)
    text = w.one_of(
        f"a {high} {w.item} at the top and a {low} {w.item} at the base",
        f"a {low} {w.item} at the base and a {high} {w.item} at the top",
        f"a {low} base and a {high} top",
    )
    return text, lambda b: len(b) > 1 and b[0].color == low and b[-1].color == high


def _height_and(w: Writer) -> Content:
    """four blocks with a yellow block at the base; 3 items and a blue item on top; three blocks having ..."""
    box = w.rng.choice(w.scene.boxes)
    how_many = quantity(w, len(box), low=2, high=4)
    # `no` and `a` state no height.
    if how_many.words in ("no", "a"):
        how_many = exactly(w, max(2, len(box)))
    joint = w.one_of("with", "having", "and")
    # `_at_level` twice: it is drawn as often as the other two together.
    options: list[Callable[[Writer], Content]] = [_at_level, _at_level, _stacked, _only_colors]
    rest, test = w.rng.choice(options)(w)
    items = plural_of(w.item) if how_many.plural else w.item
    return f"{how_many.words} {items} {joint} {rest}", lambda b: how_many.test(len(b)) and test(b)


def _stacked(w: Writer) -> Content:
    """a black block above a blue block; a blue block on top of black block; a yellow block below a black block"""
    # (lower, upper) colors of all neighboring blocks; 80% of the phrases take a pair that occurs somewhere.
    pairs = [(low.color, high.color) for b in w.scene.boxes for low, high in pairwise(b)]
    low, high = w.rng.choice(pairs) if pairs and w.chance(0.8) else (w.one_of(*COLORS), w.one_of(*COLORS))
    return stacked_words(w, low, high), lambda b: has_stacked(b, low, high)


def stacked_words(w: Writer, low: str, high: str) -> str:
    if w.chance(0.2):
        # `bellow` is a misspelling of NLVR's writers.
        under = w.one_of("below", "below", "bellow", "beneath", "right beneath")
        return f"a {low} {w.item} {under} a {high} {w.item}"
    over = w.rng.choices(("above", "over", "on", "on top of", "directly on top of"), (8, 5, 6, 1, 0.5))[0]
    return f"a {high} {w.item} {over} a {low} {w.item}"


def has_stacked(b: Box, low: str, high: str) -> bool:
    return any(below.color == low and above.color == high for below, above in pairwise(b))


def _run(w: Writer) -> Content:
    """2 blue blocks stacked together; 2 blocks stacked together of the same color; three attached with each other"""
    n = w.rng.choices((2, 3), (5, 1))[0]
    color = w.rng.choice(w.scene.items()).color
    words = w.rng.choices(("stacked together", "attached with each other", "touching each other"), (4, 2, 1))[0]
    items = plural_of(w.item)
    if w.chance(0.15):
        # Any color will do: some color has a run of at least `n`.
        return f"{w.number(n)} {items} {words} of the same {w.color}", lambda b: any(_run_of(b, c) >= n for c in COLORS)
    least = w.one_of("", "", "", "at least ")
    return f"{least}{w.number(n)} {color} {items} {words}", lambda b: _run_of(b, color) >= n


def _between(w: Writer) -> Content:
    """a black item between two items of the same color; a yellow block between two blue blocks"""
    # All windows of three successive blocks, base first; a scene of low towers has none.
    triples = [b[i : i + 3] for b in w.scene.boxes for i in range(len(b) - 2)]
    if not triples:
        return _at_level(w)
    below, middle, above = (item.color for item in w.rng.choice(triples))
    items, words = plural_of(w.item), w.one_of("between", "in between")
    if w.chance(0.5):
        same = f"{words} {w.number(2)} {items} of {w.one_of('the ', '')}same {w.color}"
        # Compare the neighbors of each inner block; the ends of a tower lie between nothing.
        return f"a {middle} {w.item} {same}", lambda b: any(
            b[i].color == middle and b[i - 1].color == b[i + 1].color for i in range(1, len(b) - 1)
        )
    outer = w.one_of(below, above)
    return f"a {middle} {w.item} {words} {w.number(2)} {outer} {items}", lambda b: any(
        b[i].color == middle and b[i - 1].color == b[i + 1].color == outer for i in range(1, len(b) - 1)
    )


def _colors(b: Box) -> frozenset[str]:
    return frozenset(item.color for item in b)


def _run_of(b: Box, color: str) -> int:
    # The longest run of one color, counted from the base upward.
    best = run = 0
    for item in b:
        run = run + 1 if item.color == color else 0
        best = max(best, run)
    return best


# Weight -> phrase for both kinds of scenes.
_BOTH: list[tuple[float, Callable[[Writer], Content]]] = [
    (9, _count),
    (4, _total),
    (5, _only_colors),
    (4, _variety),
    (4, _of_which),
    (2.5, _only_one),
]
# Weight -> phrase for scattered boxes.
_SCATTER: list[tuple[float, Callable[[Writer], Content]]] = [
    *_BOTH,
    (14, _list),
    (1.5, _colors_and),
    (0.7, _near),
]
# Weight -> phrase for towers.
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
