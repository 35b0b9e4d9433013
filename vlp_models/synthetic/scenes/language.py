"""The English of the captions: a lexicon to write with, the claims a caption makes, and the parser that checks them.

Annotators write from the lexicon and `check` reads with it, so whether a caption is true of a scene can be decided.
Every phrase belongs to a part of speech (one letter, so that a sentence is a string that a regular expression can
match) and has a value, the canonical name of its meaning. `check` tolerates misspellings. A caption outside of the
language makes no claim that could be checked: `Verdict.true` is None.
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

from vlp_models.synthetic.scenes.scene import COLORS, SHAPES, Scene, SceneObject, is_at, is_related

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")

# part of speech -> value -> phrases, the most common first
LEXICON: dict[str, dict[str, tuple[str, ...]]] = {
    "D": {"a": ("a", "an")},
    "T": {"the": ("the", "all the")},
    "#": {word: (word,) for word in NUMBERS[1:]},
    "S": {"small": ("small", "little", "tiny"), "large": ("large", "big")},
    "X": {"solid": ("solid", "plain"), "striped": ("striped", "stripy"), "dotted": ("dotted", "spotted")},
    "W": {"striped": ("with stripes",), "dotted": ("with dots",)},
    "C": {color: (color,) for color in COLORS},
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
        "middle": ("in the middle", "in the centre", "near the middle"),  # plain-ok
        "top": ("at the top", "near the top"),
        "bottom": ("at the bottom", "near the bottom"),
        "left": ("on the left", "on the left side"),
        "right": ("on the right", "on the right side"),
    },
    "B": {"be": ("is", "are", "sits", "lies")},
    "I": {  # openings without meaning
        "one": ("there is", "here is"),
        "many": ("there are", "here are"),
        "any": ("i see", "you can see", "this picture shows", "the image shows", "a picture of", "a drawing of"),
    },
    "E": {"": ("in this picture", "in the picture", "in this image", "of the picture", "of the image")},
    "O": {"": ("and some other shapes", "among other shapes", "with other shapes around it", "and a few more shapes")},
    "M": {"in": ("in",)},
}
# words of a phrase -> part of speech, value
_PHRASES = {
    tuple(phrase.split()): (part, value)
    for part, values in LEXICON.items()
    for value, phrases in values.items()
    for phrase in phrases
}
_LONGEST = max(len(words) for words in _PHRASES)
VOCABULARY = frozenset(word for words in _PHRASES for word in words)


def split_words(caption: str) -> list[str]:
    """Return the words of a caption, lower case, without punctuation."""
    return caption.lower().translate(_NO_PUNCTUATION).split()


# To a space, which separates words that a hyphen or a comma joins.
_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


@lru_cache(maxsize=65536)
def correct_spelling(word: str) -> str | None:
    """Return the vocabulary word that equals `word` or is one typo away; None if there is no such word or several.

    A typo is a letter dropped, added or replaced, or two adjacent letters swapped.
    """
    if word in VOCABULARY:
        return word
    # Words that differ by more than one letter in length are more than one typo apart.
    similar_length = [entry for entry in VOCABULARY if abs(len(entry) - len(word)) <= 1]
    near = [entry for entry in similar_length if _is_one_typo(word, entry)]
    return near[0] if len(near) == 1 else None


def _is_one_typo(a: str, b: str) -> bool:
    """Return whether two different words are one typo apart (Damerau-Levenshtein distance 1)."""
    if len(a) > len(b):
        a, b = b, a
    # The first letter that differs; after it, the rest must agree but for one typo.
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    # One letter shorter: a letter was dropped or added; else two were swapped or one was replaced.
    if len(a) < len(b):
        return a[start:] == b[start + 1 :]
    swapped = a[start : start + 2] == b[start : start + 2][::-1] and a[start + 2 :] == b[start + 2 :]
    return swapped or a[start + 1 :] == b[start + 1 :]


def misspell(word: str, rng: np.random.Generator) -> str:
    """Return `word` with a letter dropped or two swapped so that it can still be corrected; short words are kept."""
    if len(word) < 4:
        return word
    # Not the first and last letter
    for index in rng.permutation(np.arange(1, len(word) - 1)):
        if rng.random() < 0.5:
            misspelled = word[:index] + word[index + 1 :]
        else:
            misspelled = word[:index] + word[index + 1] + word[index] + word[index + 2 :]
        # Only misspellings that `correct_spelling` undoes, so that the caption can still be checked.
        if misspelled not in VOCABULARY and correct_spelling(misspelled) == word:
            return misspelled
    return word


def tag_phrases(caption: str) -> list[tuple[str, str]] | None:
    """Return the caption as (part of speech, value) pairs, longest phrases first; None if a word matches no phrase."""
    # A word that cannot be corrected is None, which is in no phrase.
    words = [correct_spelling(word) for word in split_words(caption)]
    parts, start = [], 0
    while start < len(words):
        for length in range(_LONGEST, 0, -1):
            part = _PHRASES.get(tuple(words[start : start + length]))  # type: ignore[arg-type]
            if part:
                parts.append(part)
                start += length
                break
        else:
            return None
    return parts


@dataclass(frozen=True, kw_only=True)
class Description:
    """The attributes that a phrase names; an empty string matches any value."""

    shape: str = ""
    color: str = ""
    size: str = ""
    texture: str = ""

    def matches(self, item: SceneObject) -> bool:
        return (
            self.shape in ("", item.shape)
            and self.color in ("", item.color)
            and self.size in ("", item.size)
            and self.texture in ("", item.texture)
        )

    def find_in(self, scene: Scene) -> list[SceneObject]:
        """Return the objects of a scene that match."""
        return [item for item in scene.objects if self.matches(item)]

    @property
    def named(self) -> int:
        """Return the number of attributes it names."""
        return sum(bool(value) for value in (self.shape, self.color, self.size, self.texture))


@dataclass(frozen=True)
class AtLeast:
    """`a red star`; repeated in a list, it requires two."""

    description: Description
    count: int = 1

    def is_true_of(self, scene: Scene) -> bool:
        return len(self.description.find_in(scene)) >= self.count

    @property
    def facts(self) -> int:
        return self.count * self.description.named


@dataclass(frozen=True)
class Exactly:
    """`three circles`: a number means exactly that many."""

    description: Description
    count: int

    def is_true_of(self, scene: Scene) -> bool:
        return len(self.description.find_in(scene)) == self.count

    @property
    def facts(self) -> int:
        # `three shapes` names no attribute, but its number is a fact.
        return max(1, self.count * self.description.named)


@dataclass(frozen=True)
class Related:
    """`a red star left of a circle`: some pair of different objects is in this relation."""

    first: Description
    relation: str
    second: Description

    def is_true_of(self, scene: Scene) -> bool:
        return any(
            a is not b and is_related(a, self.relation, b)
            for a in self.first.find_in(scene)
            for b in self.second.find_in(scene)
        )

    @property
    def facts(self) -> int:
        return self.first.named + self.second.named + 1


@dataclass(frozen=True)
class Located:
    """`a red star in the middle`."""

    description: Description
    position: str

    def is_true_of(self, scene: Scene) -> bool:
        return any(is_at(item, self.position) for item in self.description.find_in(scene))

    @property
    def facts(self) -> int:
        return self.description.named + 1


@dataclass(frozen=True)
class Colors:
    """`shapes in red and blue`: these colors occur; with `all`, no others do."""

    names: frozenset[str]
    all: bool = False

    def is_true_of(self, scene: Scene) -> bool:
        present = {item.color for item in scene.objects}
        return present == self.names if self.all else self.names <= present

    @property
    def facts(self) -> int:
        return len(self.names)


Claim = AtLeast | Exactly | Related | Located | Colors

FACTS_PER_OBJECT = 5  # four attributes and a position


def informative(claims: Iterable[Claim], scene: Scene) -> float:
    """Return the share, 0 to 1, of the scene's facts (attributes and positions of objects) that true claims state."""
    stated = sum(claim.facts for claim in claims if claim.is_true_of(scene))
    # A caption may state the same fact twice.
    return min(1.0, stated / (FACTS_PER_OBJECT * len(scene.objects)))


# Sentences as strings of parts of speech, one letter a phrase (`LEXICON`)
# Article or number, size, texture and color, noun, pattern: `a small red star with stripes`.
_ENTITY = r"[DT#]?[SXC]*NW?"
# A list, each entity with or without a position: `there is a star at the top and two circles`.
_ENTITIES = re.compile(rf"I?{_ENTITY}L?(?:&?{_ENTITY}L?)*O?E?")
# `a star is left of a circle`
_RELATION = re.compile(rf"I?({_ENTITY})B?R({_ENTITY})E?")
# `a star is at the top of the picture`
_PLACE = re.compile(rf"I?({_ENTITY})B?LE?O?")
# `the shapes are red and blue`, `three objects in red`, `red and blue shapes`
_COLORS = re.compile(r"I?(?:(?P<total>[T#]?)N(?P<verb>B?)M?)?(?P<list>C+(?:&C)?)(?:N)?E?")

Parts = list[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """The result of checking a caption.

    true         all claims are true; None if the caption cannot be parsed, which counts as not true
    claims       number of claims
    informative  share of the scene's facts that the true claims state (see `informative`)
    """

    true: bool | None
    claims: int
    informative: float


def check(caption: str, scene: dict[str, Any]) -> Verdict:
    """Check a caption against one record of scenes.jsonl."""
    claims = parse(caption)
    if not claims:
        return Verdict(None, 0, 0.0)
    graph = Scene.from_dict(scene)
    return Verdict(all(claim.is_true_of(graph) for claim in claims), len(claims), informative(claims, graph))


def parse(caption: str) -> list[Claim] | None:
    """Return the claims of a caption; None if it is not in the language."""
    parts = tag_phrases(caption)
    if not parts:
        return None
    tags = "".join(tag for tag, _ in parts)
    if _ENTITIES.fullmatch(tags):
        # A tag is one letter, so positions in `tags` are positions in `parts`.
        return _entities(parts, [match.span() for match in re.finditer(_ENTITY, tags)])
    match = _RELATION.fullmatch(tags)
    if match:
        first, second = _single(parts, match.span(1)), _single(parts, match.span(2))
        relation = next(value for tag, value in parts if tag == "R")
        return None if first is None or second is None else [Related(first, relation, second)]
    match = _PLACE.fullmatch(tags)
    if match:
        description = _single(parts, match.span(1))
        position = next(value for tag, value in parts if tag == "L")
        return None if description is None else [Located(description, position)]
    match = _COLORS.fullmatch(tags)
    return _colors(parts, match) if match else None


def _entities(parts: Parts, spans: list[tuple[int, int]]) -> list[Claim] | None:
    claims: list[Claim] = []
    singles: Counter[Description] = Counter()
    located: set[Description] = set()
    for start, end in spans:
        has_position = parts[end : end + 1] and parts[end][0] == "L"
        description = _single(parts, (start, end)) if has_position else _description(parts[start:end])
        if description is None:
            return None
        if has_position:
            claims.append(Located(description, parts[end][1]))
            located.add(description)
            singles[description] += 1
        elif parts[start][0] == "#":
            claims.append(Exactly(description, NUMBERS.index(parts[start][1])))
        else:
            singles[description] += 1
    # A position claims one object already; what is named several times is claimed that many times.
    for description, count in singles.items():
        if count > 1 or description not in located:
            claims.append(AtLeast(description, count))
    return claims


def _single(parts: Parts, span: tuple[int, int]) -> Description | None:
    """Return the description of one object; None for several, which relations and positions do not accept."""
    start, end = span
    if parts[start][0] == "#" and parts[start][1] != "one":
        return None
    return _description(parts[start:end])


def _description(parts: Parts) -> Description | None:
    """Return the description; None if an attribute is given twice."""
    names = {"N": "shape", "C": "color", "S": "size", "X": "texture", "W": "texture"}
    values: dict[str, str] = {}
    for tag, value in parts:
        if tag in names:
            if names[tag] in values:
                return None
            values[names[tag]] = value
    return Description(**values)


def _colors(parts: Parts, match: re.Match[str]) -> list[Claim] | None:
    names = [value for tag, value in parts if tag == "C"]
    if len(set(names)) < len(names):
        return None
    # `the shapes are red and blue` excludes other colors; `shapes in red and blue` does not.
    claims: list[Claim] = [Colors(frozenset(names), all=bool(match["verb"]))]
    if any(value for tag, value in parts if tag == "N"):
        return None  # `the stars are red` is not a sentence of the language
    if match["total"] == "#":
        number = next(value for tag, value in parts if tag == "#")
        claims.append(Exactly(Description(), NUMBERS.index(number)))
    return claims
