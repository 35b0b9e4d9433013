"""The English of the captions: one lexicon that annotators write from and the checker reads with.

Every phrase belongs to a part of speech (one letter, so that a sentence's parts are a string that a regular
expression can parse) and has a value, the canonical name of what it means.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from vlp_models.synthetic.scenes.scene import COLOURS, SHAPES, Scene, SceneObject, located, related

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")

# part of speech -> value -> phrases, the plainest first
LEXICON: dict[str, dict[str, tuple[str, ...]]] = {
    "D": {"a": ("a", "an")},
    "T": {"the": ("the", "all the")},
    "#": {word: (word,) for word in NUMBERS[1:]},
    "S": {"small": ("small", "little", "tiny"), "large": ("large", "big")},
    "X": {"solid": ("solid", "plain"), "striped": ("striped", "stripy"), "dotted": ("dotted", "spotted")},
    "W": {"striped": ("with stripes",), "dotted": ("with dots",)},
    "C": {colour: (colour,) for colour in COLOURS},
    "N": {
        "": ("shape", "shapes", "object", "objects"),
        "circle": ("circle", "circles", "disc", "discs"),
        **{shape: (shape, shape + "s") for shape in SHAPES[1:]},
    },
    "&": {"and": ("and",)},
    "R": {
        "left": ("left of", "to the left of"),
        "right": ("right of", "to the right of"),
        "above": ("above", "over", "higher than"),
        "below": ("below", "under", "lower than"),
    },
    "L": {
        "middle": ("in the middle", "in the centre", "near the middle"),
        "top": ("at the top", "near the top"),
        "bottom": ("at the bottom", "near the bottom"),
        "left": ("on the left", "on the left side"),
        "right": ("on the right", "on the right side"),
    },
    "B": {"be": ("is", "are", "sits", "lies")},
    "I": {  # what may stand before anything, and says nothing
        "one": ("there is", "here is"),
        "many": ("there are", "here are"),
        "any": ("i see", "you can see", "this picture shows", "the image shows", "a picture of", "a drawing of"),
    },
    "E": {"": ("in this picture", "in the picture", "in this image", "of the picture", "of the image")},
    "O": {"": ("and some other shapes", "among other shapes", "with other shapes around it", "and a few more shapes")},
    "M": {"in": ("in",)},
}
_PHRASES = {
    tuple(phrase.split()): (part, value)
    for part, values in LEXICON.items()
    for value, phrases in values.items()
    for phrase in phrases
}
_LONGEST = max(len(words) for words in _PHRASES)
VOCABULARY = frozenset(word for words in _PHRASES for word in words)


def words_of(caption: str) -> list[str]:
    """The caption's words, lower-case, without punctuation."""
    return caption.lower().translate(_NO_PUNCTUATION).split()


_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


@lru_cache(maxsize=65536)
def corrected(word: str) -> str | None:
    """The vocabulary's word that `word` is, or is one slip away from; None if there is none or several.

    A slip is a letter dropped, added or replaced, or two neighbours swapped.
    """
    if word in VOCABULARY:
        return word
    near = [known for known in VOCABULARY if abs(len(known) - len(word)) <= 1 and _one_slip(word, known)]
    return near[0] if len(near) == 1 else None


def _one_slip(a: str, b: str) -> bool:
    """Whether two different words are one slip apart (Damerau-Levenshtein distance 1)."""
    if len(a) > len(b):
        a, b = b, a
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(a) < len(b):
        return a[start:] == b[start + 1 :]
    swapped = a[start : start + 2] == b[start : start + 2][::-1] and a[start + 2 :] == b[start + 2 :]
    return swapped or a[start + 1 :] == b[start + 1 :]


def misspelled(word: str, rng: np.random.Generator) -> str:
    """`word` with a letter dropped or two swapped, such that it can be read back; short words stay as they are."""
    if len(word) < 4:
        return word
    for at in rng.permutation(np.arange(1, len(word) - 1)):
        if rng.random() < 0.5:
            slip = word[:at] + word[at + 1 :]
        else:
            slip = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        if slip not in VOCABULARY and corrected(slip) == word:
            return slip
    return word


def parts_of(caption: str) -> list[tuple[str, str]] | None:
    """The caption as (part of speech, value) pairs, longest phrases first; None where a word fits nowhere."""
    words = [corrected(word) for word in words_of(caption)]
    parts, at = [], 0
    while at < len(words):
        for length in range(_LONGEST, 0, -1):
            found = _PHRASES.get(tuple(words[at : at + length]))  # type: ignore[arg-type]
            if found:
                parts.append(found)
                at += length
                break
        else:
            return None
    return parts


@dataclass(frozen=True, kw_only=True)
class Description:
    """The attributes a phrase names; the empty string leaves one open."""

    shape: str = ""
    colour: str = ""
    size: str = ""
    texture: str = ""

    def matches(self, item: SceneObject) -> bool:
        return (
            self.shape in ("", item.shape)
            and self.colour in ("", item.colour)
            and self.size in ("", item.size)
            and self.texture in ("", item.texture)
        )

    def among(self, scene: Scene) -> list[SceneObject]:
        return [item for item in scene.objects if self.matches(item)]

    @property
    def named(self) -> int:
        """How many attributes it names."""
        return sum(bool(value) for value in (self.shape, self.colour, self.size, self.texture))


@dataclass(frozen=True)
class AtLeast:
    """`a red star`; said twice in a list, it asks for two."""

    what: Description
    count: int = 1

    def holds(self, scene: Scene) -> bool:
        return len(self.what.among(scene)) >= self.count

    @property
    def facts(self) -> int:
        return self.count * self.what.named


@dataclass(frozen=True)
class Exactly:
    """`three circles`: a number word means that many and no more."""

    what: Description
    count: int

    def holds(self, scene: Scene) -> bool:
        return len(self.what.among(scene)) == self.count

    @property
    def facts(self) -> int:
        return max(1, self.count * self.what.named)


@dataclass(frozen=True)
class Related:
    """`a red star left of a circle`: some pair of different objects stands so."""

    first: Description
    relation: str
    second: Description

    def holds(self, scene: Scene) -> bool:
        return any(
            a is not b and related(a, self.relation, b)
            for a in self.first.among(scene)
            for b in self.second.among(scene)
        )

    @property
    def facts(self) -> int:
        return self.first.named + self.second.named + 1


@dataclass(frozen=True)
class Located:
    """`a red star in the middle`."""

    what: Description
    place: str

    def holds(self, scene: Scene) -> bool:
        return any(located(item, self.place) for item in self.what.among(scene))

    @property
    def facts(self) -> int:
        return self.what.named + 1


@dataclass(frozen=True)
class Colours:
    """`shapes in red and blue`: these colours occur; with `all`, no other one does."""

    names: frozenset[str]
    all: bool = False

    def holds(self, scene: Scene) -> bool:
        present = {item.colour for item in scene.objects}
        return present == self.names if self.all else self.names <= present

    @property
    def facts(self) -> int:
        return len(self.names)


Claim = AtLeast | Exactly | Related | Located | Colours

FACTS_PER_OBJECT = 5  # four attributes and a place


def informative(claims: Iterable[Claim], scene: Scene) -> float:
    """The share, 0 to 1, of the scene's facts (four attributes and a place an object) that true claims state."""
    stated = sum(claim.facts for claim in claims if claim.holds(scene))
    return min(1.0, stated / (FACTS_PER_OBJECT * len(scene.objects)))


_ENTITY = r"[DT#]?[SXC]*NW?"
_ENTITIES = re.compile(rf"I?{_ENTITY}L?(?:&?{_ENTITY}L?)*O?E?")
_RELATION = re.compile(rf"I?({_ENTITY})B?R({_ENTITY})E?")
_PLACE = re.compile(rf"I?({_ENTITY})B?LE?O?")
_COLOURS = re.compile(r"I?(?:(?P<total>[T#]?)N(?P<verb>B?)M?)?(?P<list>C+(?:&C)?)(?:N)?E?")

Parts = list[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """true: all claims hold; None where the caption can't be parsed, which counts as not true. claims: how many
    it makes. informative: the share of the scene's facts that its true claims state (see claims.informative)."""

    true: bool | None
    claims: int
    informative: float


def check(caption: str, scene: dict[str, Any]) -> Verdict:
    """Checks a caption against one line of scenes.jsonl."""
    claims = parse(caption)
    if not claims:
        return Verdict(None, 0, 0.0)
    graph = Scene.from_dict(scene)
    return Verdict(all(claim.holds(graph) for claim in claims), len(claims), informative(claims, graph))


def parse(caption: str) -> list[Claim] | None:
    """The caption's claims; None where it is not of the language."""
    parts = parts_of(caption)
    if not parts:
        return None
    tags = "".join(tag for tag, _ in parts)
    if _ENTITIES.fullmatch(tags):
        return _entities(parts, [found.span() for found in re.finditer(_ENTITY, tags)])
    if found := _RELATION.fullmatch(tags):
        first, second = (_single(parts, found.span(group)) for group in (1, 2))
        relation = next(value for tag, value in parts if tag == "R")
        return None if first is None or second is None else [Related(first, relation, second)]
    if found := _PLACE.fullmatch(tags):
        what = _single(parts, found.span(1))
        return None if what is None else [Located(what, next(value for tag, value in parts if tag == "L"))]
    if found := _COLOURS.fullmatch(tags):
        return _colours(parts, found)
    return None


def _entities(parts: Parts, spans: list[tuple[int, int]]) -> list[Claim] | None:
    claims: list[Claim] = []
    singles: Counter[Description] = Counter()
    located: set[Description] = set()
    for start, end in spans:
        has_place = parts[end : end + 1] and parts[end][0] == "L"
        what = _single(parts, (start, end)) if has_place else _description(parts[start:end])
        if what is None:
            return None
        if has_place:
            claims.append(Located(what, parts[end][1]))
            located.add(what)
            singles[what] += 1
        elif parts[start][0] == "#":
            claims.append(Exactly(what, NUMBERS.index(parts[start][1])))
        else:
            singles[what] += 1
    return claims + [AtLeast(what, n) for what, n in singles.items() if n > 1 or what not in located]


def _single(parts: Parts, span: tuple[int, int]) -> Description | None:
    """One object's description; None for a number of them, of which `left of` and the like can't be said."""
    start, end = span
    if parts[start][0] == "#" and parts[start][1] != "one":
        return None
    return _description(parts[start:end])


def _description(parts: Parts) -> Description | None:
    """None where an attribute is given twice."""
    names = {"N": "shape", "C": "colour", "S": "size", "X": "texture", "W": "texture"}
    values: dict[str, str] = {}
    for tag, value in parts:
        if tag in names:
            if names[tag] in values:
                return None
            values[names[tag]] = value
    return Description(**values)


def _colours(parts: Parts, found: re.Match[str]) -> list[Claim] | None:
    names = [value for tag, value in parts if tag == "C"]
    if len(set(names)) < len(names):
        return None
    # `the shapes are red and blue` leaves no room for other colours; `shapes in red and blue` does.
    claims: list[Claim] = [Colours(frozenset(names), all=bool(found["verb"]))]
    if any(value for tag, value in parts if tag == "N"):
        return None  # `the stars are red`: the language has no such sentence
    if found["total"] == "#":
        number = next(value for tag, value in parts if tag == "#")
        claims.append(Exactly(Description(), NUMBERS.index(number)))
    return claims
