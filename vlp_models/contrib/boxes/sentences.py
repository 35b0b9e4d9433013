"""Sentences about a scene of three boxes, with a test of their truth, as NLVR's writers type them.

The families and their weights follow NLVR's training sentences; no other split was read. `add_typos` imitates the
writers: no capitals or full stops, a letter lost, "is" for "are".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from vlp_models.contrib.boxes.phrases import content, has_stacked, level_is, stacked_words, tower_level
from vlp_models.contrib.boxes.scene import COLORS, Box, Scene
from vlp_models.contrib.boxes.words import (
    BoxTest,
    Noun,
    Quantity,
    SceneTest,
    Writer,
    describe,
    exactly,
    make_writer,
    noun,
    place,
    placed,
    plural_of,
    quantity,
    some,
)


class Sentence(NamedTuple):
    text: str
    test: SceneTest


def write_sentence(rng: random.Random, scene: Scene, *, simple: bool = False) -> Sentence:
    """Return a sentence that is true of `scene` about half of the time. `simple`: from families that state one fact."""
    writer = make_writer(rng, scene)
    table = _TOWER if scene.kind == "tower" else _SCATTER
    if simple:
        # Simple sentences are a subset, with the weights they have among all sentences of this kind.
        table = [(weight, family) for weight, family in table if family in _SIMPLE]
    family = rng.choices([f for _, f in table], [weight for weight, _ in table])[0]
    sentence = family(writer)
    return Sentence(add_typos(rng, sentence.text), sentence.test)


def _there(w: Writer, how_many: Quantity, rest: str) -> str:
    return f"there {how_many.is_are} {rest}"


def _boxes_with(w: Writer) -> Sentence:
    """There is a box with ...; There are exactly two towers that have ..."""
    words, test = content(w)
    actual = sum(map(test, w.scene.boxes))
    # A plain `a box with` in most cases; otherwise a number near the true one.
    how_many = some(w) if w.chance(0.62) else quantity(w, actual, high=3)
    boxes = Noun(singular=w.box, plural=plural_of(w.box), test=lambda _: True)
    verbs = ("contain", "have") if how_many.plural else ("contains", "has")
    # `which has` also follows a plural, as NLVR's writers type it.
    joint = w.rng.choices(
        ("with", f"that {verbs[1]}", f"which {verbs[1]}", f"that {verbs[0]}", "containing", "having", "which has"),
        (14, 1.5, 2, 0.7, 0.4, 0.3, 0.5),
    )[0]
    each = " each" if how_many.plural and w.chance(0.08) else ""
    return Sentence(
        _there(w, how_many, f"{boxes.after(how_many)} {joint} {words}{each}"),
        lambda s: how_many.test(sum(map(test, s.boxes))),
    )


def _one_of_the(w: Writer) -> Sentence:
    """One of the grey box has ...; the tower with three blocks has ...; One box has ..."""  # plain-ok
    words, test = content(w)
    has = w.one_of("has", "has", "contains")
    roll = w.rng.random()
    if w.scene.kind == "tower" and roll < 0.45:
        # If no box satisfies the content, take any: the sentence is then false of this scene.
        n = len(w.rng.choice([b for b in w.scene.boxes if test(b)] or w.scene.boxes))
        if n > 1:
            number = w.one_of("", "", "exactly ") + w.number(n)
            lead = w.one_of("the", "the", "one of the")
            return Sentence(
                f"{lead} {w.box} with {number} {plural_of(w.item)} {has} {words}",
                lambda s: any(len(b) == n and test(b) for b in s.boxes),
            )
    if roll < 0.6:
        lead = w.one_of(f"one of the {w.box}", f"one of the {plural_of(w.box)}", f"at least one of the {w.box}")
    else:
        lead = w.one_of(f"at least one {w.box}", f"one {w.box}")
    # `one box has` means at least one: several such boxes do not make it false.
    return Sentence(f"{lead} {has} {words}", lambda s: any(map(test, s.boxes)))


def _count_all(w: Writer) -> Sentence:
    """There are 2 yellow circles; There are exactly two blue objects touching the edge; There is no circle ..."""
    phrase = describe(w)
    if w.scene.kind == "scatter" and w.chance(0.6):
        phrase = placed(w, phrase)
    actual = phrase.count(w.scene.items())
    # The bare number is exact; `_about` moves it by one in a third of the cases.
    how_many = exactly(w, _about(w, actual)) if w.chance(0.25) else quantity(w, actual)
    return Sentence(_there(w, how_many, phrase.after(how_many)), lambda s: how_many.test(phrase.count(s.items())))


def _two_kinds(w: Writer) -> Sentence:
    """There is 1 blue triangle and 1 yellow triangle (anywhere)"""
    nouns = [describe(w, bare=0.0) for _ in range(2)]
    pairs = [(phrase, exactly(w, _about(w, phrase.count(w.scene.items())))) for phrase in nouns]
    text = " and ".join(phrase.after(how_many) for phrase, how_many in pairs)
    return Sentence(
        _there(w, pairs[0][1], text),
        lambda s: all(how_many.test(phrase.count(s.items())) for phrase, how_many in pairs),
    )


def _each_box(w: Writer) -> Sentence:
    """Each box has at least 1 black item; There is a yellow block in each tower"""
    phrase = describe(w)
    # A number near the smallest count: above it, `each box has at least` that many is false.
    how_many = quantity(w, min(map(phrase.count, w.scene.boxes)), high=3)
    if how_many.words == "no":
        how_many = some(w)
    test: BoxTest = lambda b: how_many.test(phrase.count(b))  # noqa: E731
    text = w.one_of(
        f"each {w.box} has {phrase.after(how_many)}",
        _there(w, how_many, f"{phrase.after(how_many)} in each {w.box}"),
        f"all the {plural_of(w.box)} have {phrase.after(how_many)}",
    )
    return Sentence(text, lambda s: all(map(test, s.boxes)))


def _touching(w: Writer) -> Sentence:
    """None of the blue triangles are touching the edge; Exactly 3 triangles are not touching the wall; ..."""
    phrase = describe(w)
    words, at = place(w)
    # `here` and `away` split the items of the phrase: those that touch the wall and those that do not.
    here = lambda i: phrase.test(i) and at(i)  # noqa: E731
    away = lambda i: phrase.test(i) and not at(i)  # noqa: E731
    roll = w.rng.random()
    if roll < 0.3:
        return Sentence(f"none of the {phrase.plural} are {words}", lambda s: not any(map(here, s.items())))
    if roll < 0.4:
        return Sentence(f"all the {phrase.plural} are {words}", lambda s: not any(map(away, s.items())))
    if roll < 0.5:
        return Sentence(
            f"there is a {w.box} where none of the {phrase.plural} are {words}",
            # The box must have such items at all: an empty set does not count as `none of the ...`.
            lambda s: any(any(map(phrase.test, b)) and not any(map(here, b)) for b in s.boxes),
        )
    test, negation = (away, "not ") if w.chance(0.4) else (here, "")
    if roll < 0.65:
        # `the circle is touching` is true if any circle does, even if there are several.
        return Sentence(f"the {phrase.singular} is {negation}{words}", lambda s: any(map(test, s.items())))
    how_many = quantity(w, sum(map(test, w.scene.items())))
    if how_many.words == "no":
        how_many = some(w)
    return Sentence(
        f"{phrase.after(how_many)} {how_many.is_are} {negation}{words}",
        lambda s: how_many.test(sum(map(test, s.items()))),
    )


def _same_number(w: Writer) -> Sentence:
    """There are two boxes that has the same number of objects; There are two towers of the same height"""
    boxes, number = plural_of(w.box), w.number(2)
    if w.scene.kind == "tower":
        tail = w.one_of("with the same height", f"with the same number of {plural_of(w.item)}")
    else:
        tail = w.one_of("that has", "which has", "with") + f" the same number of {plural_of(w.item)}"
    return Sentence(
        f"there are {w.one_of('', 'exactly ')}{number} {boxes} {tail}",
        # Two different sizes among three boxes: exactly two agree, so three equal boxes make the sentence false.
        lambda s: len({len(b) for b in s.boxes}) == 2,
    )


def _level_of_towers(w: Writer) -> Sentence:
    """There is a black block as the base of a tower with exactly two blocks; ... as the base of two towers"""
    color = w.rng.choice(w.scene.items()).color
    part, level = w.one_of(("base", 0), ("base", 0), ("top", -1))
    # Without a condition on the height, every tower qualifies.
    condition: BoxTest = lambda b: True  # noqa: E731
    tail = ""
    if w.chance(0.6):
        height = quantity(w, len(w.rng.choice(w.scene.boxes)), low=2, high=4)
        if height.words not in ("a", "no"):
            condition = lambda b: height.test(len(b))  # noqa: E731
            tail = f" with {height.words} {plural_of(w.item) if height.plural else w.item}"
    test: BoxTest = lambda b: condition(b) and level_is(b, level, color)  # noqa: E731
    actual = sum(map(test, w.scene.boxes))
    if w.chance(0.15):
        towers = quantity(w, actual, high=3)
        if towers.words not in ("a", "no"):
            return Sentence(
                f"there is a {color} {w.item} as the {part} of {towers.words} "
                f"{plural_of(w.box) if towers.plural else w.box}",
                # This sentence drops the height: its test counts all towers with the color at that level.
                lambda s: towers.test(sum(level_is(b, level, color) for b in s.boxes)),
            )
    how_many = some(w) if w.chance(0.5) else quantity(w, actual, high=3)
    phrase = noun(w, color=color)
    return Sentence(
        _there(w, how_many, f"{phrase.after(how_many)} as the {part} of a tower{tail}"),
        lambda s: how_many.test(sum(map(test, s.boxes))),
    )


def _of_the_three(w: Writer) -> Sentence:
    """Two of the three towers has a black base; One of the three towers is blue; all the towers have ... at the top"""
    color = w.rng.choice(w.scene.items()).color
    whole_tower = w.chance(0.2)
    words, level = tower_level(w)
    test: BoxTest = (lambda b: all(i.color == color for i in b)) if whole_tower else lambda b: level_is(b, level, color)
    # Off by one in half of the cases, between 1 and 3 towers.
    n = max(1, min(3, sum(map(test, w.scene.boxes)) + w.rng.choice((-1, 0, 0, 1))))
    has = f"a {color} {w.item} {words}"
    if level == 0 and w.chance(0.4):
        has = f"a {color} base"
    if n == 3:
        text = f"all the {plural_of(w.box)} {f'are {color}' if whole_tower else f'have {has}'}"
    else:
        # Half of the plurals get a singular verb, as NLVR's writers type them.
        verb = w.one_of("is", "are" if n > 1 else "is") if whole_tower else w.one_of("has", "have" if n > 1 else "has")
        text = f"{w.number(n)} of the {w.one_of('three ', '')}{plural_of(w.box)} {verb} {color if whole_tower else has}"
    return Sentence(text, lambda s: sum(map(test, s.boxes)) == n)


def _one_color(w: Writer) -> Sentence:
    """There is a blue tower; There is a yellow tower with only one block; a two blocks tower that has a single color"""
    color = w.rng.choice(w.scene.items()).color
    height = len(w.rng.choice(w.scene.boxes))
    if w.chance(0.25) and height > 1:
        # The three endings, and the test on the tower's colors that each implies.
        end, test_color = w.one_of(
            ("", _anything), (f" that has a single {w.color}", _single), (f" and only one {w.color}", _single)
        )
        return Sentence(
            f"there is a {w.number(height)} {plural_of(w.item)} tower{end}",
            lambda s: any(len(b) == height and test_color(b) for b in s.boxes),
        )
    # Without a stated height, any height qualifies.
    tail, fits = "", lambda n: True
    if w.chance(0.5):
        how_many = quantity(w, height, high=4)
        if how_many.words not in ("a", "no"):
            fits = how_many.test
            tail = (
                w.one_of(" with", " that has") + f" {how_many.words} {plural_of(w.item) if how_many.plural else w.item}"
            )
    return Sentence(
        f"there is a {color} tower{tail}",
        lambda s: any(fits(len(b)) and all(i.color == color for i in b) for b in s.boxes),
    )


def _stacked_anywhere(w: Writer) -> Sentence:
    """There is a black block on a blue block; There is no yellow block above a black block"""
    pairs = [(low.color, high.color) for b in w.scene.boxes for low, high in pairwise(b)]
    low, high = w.rng.choice(pairs) if pairs and w.chance(0.8) else (w.one_of(*COLORS), w.one_of(*COLORS))
    words = stacked_words(w, low, high)
    if w.chance(0.25):
        how_many = quantity(w, sum(has_stacked(b, low, high) for b in w.scene.boxes), high=2)
        # Only these fit before a singular noun.
        if how_many.words in ("no", "exactly one", "at least one", "only one"):
            return Sentence(
                f"there is {how_many.words} {words.removeprefix('a ')}",
                # Pairs within one tower count separately: a tower of three blocks of one color has two of them.
                lambda s: how_many.test(sum(_times_stacked(b, low, high) for b in s.boxes)),
            )
    return Sentence(f"there is {words}", lambda s: any(has_stacked(b, low, high) for b in s.boxes))


def _from_the_base(w: Writer) -> Sentence:
    """The second block from the base of a tower is black; The base of a four blocks tower is yellow"""
    box: Box = w.rng.choice(w.scene.boxes)
    color = w.rng.choice(box).color
    level = w.rng.randrange(len(box))
    if w.chance(0.4):
        n, (part, level) = len(box), w.one_of(("base", 0), ("top", -1))
        return Sentence(
            f"the {part} of a {w.number(n)} {plural_of(w.item) if n > 1 else w.item} tower is {color}",
            lambda s: any(len(b) == n and level_is(b, level, color) for b in s.boxes),
        )
    order = ("first", "second", "third", "fourth")[level]
    return Sentence(
        f"the {order} {w.item} from the base of a tower is {color}",
        lambda s: any(level_is(b, level, color) for b in s.boxes),
    )


def _same_part(w: Writer) -> Sentence:
    """There are only two towers that has the same base color; There are at least two towers with the same color"""
    part, level = w.one_of(("base", 0), ("base", 0), ("top", -1))
    boxes, number = plural_of(w.box), w.number(2)
    how = w.one_of("", "exactly ", "only ", "at least ")

    def test(s: Scene) -> bool:
        colors = [b[level].color for b in s.boxes]
        # The number of towers that share the most frequent color at this level.
        same = max(colors.count(c) for c in COLORS)
        # Without `at least`, three equal towers make `two towers` false, as bare numbers are exact.
        return same >= 2 if how == "at least " else same == 2

    words = w.one_of(
        f"that has the same {part} {w.color}", f"with {w.item} of same {w.color} at {w.one_of('the ', '')}{part}"
    )
    return Sentence(f"there are {how}{number} {boxes} {words}", test)


def _anything(_: Box) -> bool:
    return True


def _single(b: Box) -> bool:
    return len({item.color for item in b}) == 1


def _times_stacked(b: Box, low: str, high: str) -> int:
    return sum(below.color == low and above.color == high for below, above in pairwise(b))


def _about(w: Writer, actual: int) -> int:
    return max(1, actual + w.rng.choices((-1, 0, 1), (1, 4, 1))[0])


# Weight -> family for scattered boxes.
_SCATTER: list[tuple[float, Callable[[Writer], Sentence]]] = [
    (50, _boxes_with),
    (8, _one_of_the),
    (45, _count_all),
    (2, _two_kinds),
    (3, _each_box),
    (6, _touching),
    (1, _same_number),
]
# Weight -> family for towers.
_TOWER: list[tuple[float, Callable[[Writer], Sentence]]] = [
    (48, _boxes_with),
    (8, _one_of_the),
    (9, _count_all),
    (2, _each_box),
    (15, _level_of_towers),
    (4, _of_the_three),
    (4, _one_color),
    (12, _stacked_anywhere),
    (3, _from_the_base),
    (1, _same_number),
    (2, _same_part),
]
# Families that state one fact about one kind of item or block.
_SIMPLE = (_count_all, _level_of_towers, _stacked_anywhere, _of_the_three, _one_color)


# What is written -> what a hurried writer types; the first occurrence only.
_SLIPS = (("at least", "atleast"), ("at least", "t least"), ("there is a ", "there is "), ("  ", " "), (" a ", " as "))


def add_typos(rng: random.Random, text: str) -> str:
    """Return `text` as one of NLVR's writers might have typed it."""
    if text.startswith("there are") and rng.random() < 0.01:
        text = text.replace("there are", "there is", 1)
    if rng.random() < 0.02:
        old, new = rng.choice(_SLIPS)
        text = text.replace(old, new, 1)
    if rng.random() < 0.02:
        text = _typo(rng, text)
    if rng.random() < 0.75:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.55 else text


def _typo(rng: random.Random, text: str) -> str:
    # Neither the first nor the last character, so that the swap below always has a right neighbor.
    at = rng.randrange(1, len(text) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
