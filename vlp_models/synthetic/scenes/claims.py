"""What a sentence can say about a scene, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vlp_models.synthetic.scenes.world import Scene, SceneObject, located, related


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
