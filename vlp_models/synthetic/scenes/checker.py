"""Is a caption true of a scene, and how much does it say?

Reads the language of `language.py`, misspellings included. A caption that is not of that language claims nothing
that could be checked: it is not true (`Verdict.true` is None).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vlp_models.synthetic.scenes.claims import (
    AtLeast,
    Claim,
    Colours,
    Description,
    Exactly,
    Located,
    Related,
    informative,
)
from vlp_models.synthetic.scenes.language import NUMBERS, parts_of
from vlp_models.synthetic.scenes.world import Scene

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
