"""What a scene is made of: objects with attributes and places, and the relations that follow from the places."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.synthetic.scenes.outlines import covered, outline

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "yellow", "green", "blue", "purple", "black")
SIZES = ("small", "large")
TEXTURES = ("solid", "striped", "dotted")
RELATIONS = ("left", "right", "above", "below")
PLACES = ("middle", "top", "bottom", "left", "right")
CATEGORIES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)

MIN_OBJECTS, MAX_OBJECTS = 2, 8
# How often a scene gets 2, 3, ... 8 objects: small scenes prevail, since words ground fastest where little is to see.
OBJECT_COUNTS = (0.22, 0.22, 0.18, 0.14, 0.10, 0.08, 0.06)
MIN_VISIBLE = 0.42  # of every object's pixels, whatever lies over it
RELATION_MARGIN = 0.08  # fraction of the side by which two centres must differ
MIDDLE = 0.2  # how far from the centre "in the middle" reaches, along each axis
EDGE = 0.4  # how far from an edge "at the top" and the like reach

_RADIUS = {"small": (0.072, 0.09), "large": (0.135, 0.165)}  # fractions of the side
_TURN = {"circle": 0.0, "square": 0.3, "triangle": 0.35, "star": 0.6}  # most radians either way


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """One object. Later objects of a scene lie over earlier ones."""

    shape: str
    colour: str
    size: str
    texture: str
    x: float  # centre, as a fraction of the side
    y: float
    radius: float  # nominal, as a fraction of the side
    angle: float  # radians
    box: tuple[int, int, int, int]  # pixels that can be seen: x1, y1, x2, y2, the last two exclusive
    visible: float  # share of its pixels that nothing covers

    def points(self, side: float) -> list[tuple[float, float]]:
        """The outline in an image of `side` pixels."""
        return outline(self.shape, self.x * side, self.y * side, self.radius * side, self.angle)

    @property
    def category(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A scene graph. Its relations are not stored: they follow from the objects' centres."""

    image_id: str
    split: str
    side: int  # pixels
    objects: tuple[SceneObject, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> Scene:
        """Reads one line of scenes.jsonl."""
        objects = tuple(SceneObject(**{**o, "box": tuple(o["box"])}) for o in raw["objects"])
        return Scene(image_id=str(raw["image_id"]), split=raw["split"], side=raw["side"], objects=objects)


def related(a: SceneObject, relation: str, b: SceneObject) -> bool:
    """Whether `a` is left of, right of, above or below `b`: their centres differ by more than the margin."""
    if relation == "left":
        return b.x - a.x > RELATION_MARGIN
    if relation == "right":
        return a.x - b.x > RELATION_MARGIN
    if relation == "above":
        return b.y - a.y > RELATION_MARGIN
    return a.y - b.y > RELATION_MARGIN


def located(a: SceneObject, place: str) -> bool:
    """Whether `a` is in the middle, at the top, at the bottom, on the left or on the right of the picture."""
    if place == "middle":
        return abs(a.x - 0.5) < MIDDLE and abs(a.y - 0.5) < MIDDLE
    if place == "top":
        return a.y < EDGE
    if place == "bottom":
        return a.y > 1 - EDGE
    return a.x < EDGE if place == "left" else a.x > 1 - EDGE


def sample_scene(rng: np.random.Generator, *, image_id: str, split: str, side: int) -> Scene:
    """Draws a scene of 2 to 8 objects.

    Shapes and colours cluster (their weights are Dirichlet draws), so that counts vary widely and unique objects
    are common in small scenes. An object that finds no place where everything stays visible is left out.
    """
    shape_weights = rng.dirichlet([1.0] * len(SHAPES))
    colour_weights = rng.dirichlet([0.8] * len(COLOURS))
    crowded = rng.random() < 0.45
    wanted = MIN_OBJECTS + int(rng.choice(len(OBJECT_COUNTS), p=OBJECT_COUNTS))
    placed: list[SceneObject] = []
    masks: list[NDArray[np.bool_]] = []
    for _ in range(wanted):
        shape = SHAPES[rng.choice(len(SHAPES), p=shape_weights)]
        colour = COLOURS[rng.choice(len(COLOURS), p=colour_weights)]
        texture = TEXTURES[rng.choice(len(TEXTURES), p=[0.5, 0.25, 0.25])]
        size = SIZES[int(rng.random() < 0.4)]
        for attempt in range(40):
            if attempt == 25:
                size = "small"
            radius = rng.uniform(*_RADIUS[size])
            margin = radius * 1.3
            new = SceneObject(
                shape=shape,
                colour=colour,
                size=size,
                texture=texture,
                x=round(float(rng.uniform(margin, 1 - margin)), 4),
                y=round(float(rng.uniform(margin, 1 - margin)), 4),
                radius=round(float(radius), 4),
                angle=round(float(rng.uniform(-_TURN[shape], _TURN[shape])), 4),
                box=(0, 0, 0, 0),
                visible=1.0,
            )
            if not crowded and any(_touch(new, other) for other in placed):
                continue
            mask = covered(new.points(side), side)
            if all(_visible(m, [*masks[i + 1 :], mask]) >= MIN_VISIBLE for i, m in enumerate(masks)):
                placed.append(new)
                masks.append(mask)
                break
    objects = tuple(_as_seen(o, masks[i], masks[i + 1 :]) for i, o in enumerate(placed))
    return Scene(image_id=image_id, split=split, side=side, objects=objects)


def _touch(a: SceneObject, b: SceneObject) -> bool:
    return math.hypot(a.x - b.x, a.y - b.y) < 1.2 * (a.radius + b.radius)


def _visible(mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> float:
    return _uncovered(mask, above).sum() / mask.sum()


def _uncovered(mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    for other in above:
        mask = mask & ~other
    return mask


def _as_seen(a: SceneObject, mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> SceneObject:
    """`a` with the box of its visible pixels and the share of them."""
    seen = _uncovered(mask, above)
    rows, columns = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    return dataclasses.replace(a, box=box, visible=round(float(seen.sum() / mask.sum()), 3))
