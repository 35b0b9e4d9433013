"""Scenes of simple objects: attributes, positions, the relations that follow from them, and how they are drawn.

A scene has 2 to 8 objects with shape, color, size and texture. `sample_scene` draws a scene graph, `render` its image:
a varied background, shaded and textured objects, anti-aliasing and sensor noise.
"""

from __future__ import annotations

import colorsys
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SHAPES = ("circle", "square", "triangle", "star")
COLORS = ("red", "yellow", "green", "blue", "purple", "black")
SIZES = ("small", "large")
TEXTURES = ("solid", "striped", "dotted")
RELATIONS = ("left", "right", "above", "below")
PLACES = ("middle", "top", "bottom", "left", "right")
CATEGORIES = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)

MIN_OBJECTS, MAX_OBJECTS = 2, 8
# Probabilities of 2, 3, ... 8 objects: mostly small scenes, because words are grounded fastest in simple images.
OBJECT_COUNTS = (0.22, 0.22, 0.18, 0.14, 0.10, 0.08, 0.06)
MIN_VISIBLE = 0.42  # minimum visible share of each object's pixels
RELATION_MARGIN = 0.08  # fraction of the side by which two centers must differ
MIDDLE = 0.2  # "in the middle": maximum distance from the center, along each axis
EDGE = 0.4  # "at the top" etc.: maximum distance from that edge

_JSON_KEYS = {"color": "colour"}  # field -> key in scenes.jsonl, plain-ok
_RADIUS = {"small": (0.072, 0.09), "large": (0.135, 0.165)}  # fractions of the side
_TURN = {"circle": 0.0, "square": 0.3, "triangle": 0.35, "star": 0.6}  # maximum rotation in radians, either way


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """One object. Later objects of a scene cover earlier ones."""

    shape: str
    color: str
    size: str
    texture: str
    x: float  # center, as a fraction of the side
    y: float
    radius: float  # nominal, as a fraction of the side
    angle: float  # radians
    box: tuple[int, int, int, int]  # visible pixels: x1, y1, x2, y2, the last two exclusive
    visible: float  # share of its pixels that no other object covers

    def points(self, side: float) -> list[tuple[float, float]]:
        """Return the corners of the object in an image of `side` pixels."""
        return shape_corners(self.shape, self.x * side, self.y * side, self.radius * side, self.angle)

    @property
    def category(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A scene graph. Relations are not stored: they follow from the objects' centers."""

    image_id: str
    split: str
    side: int  # pixels
    objects: tuple[SceneObject, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return one record of scenes.jsonl."""
        record = dataclasses.asdict(self)
        objects = []
        for item in record["objects"]:
            objects.append({_JSON_KEYS.get(name, name): value for name, value in item.items()})
        record["objects"] = objects
        return record

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> Scene:
        """Read one record of scenes.jsonl."""
        name_of = {key: name for name, key in _JSON_KEYS.items()}
        objects = []
        for item in raw["objects"]:
            fields = {name_of.get(key, key): value for key, value in item.items()}
            fields["box"] = tuple(item["box"])
            objects.append(SceneObject(**fields))
        return Scene(image_id=str(raw["image_id"]), split=raw["split"], side=raw["side"], objects=tuple(objects))


def is_related(a: SceneObject, relation: str, b: SceneObject) -> bool:
    """Return whether `a` is left of, right of, above or below `b`: their centers differ by more than the margin."""
    if relation == "left":
        return b.x - a.x > RELATION_MARGIN
    if relation == "right":
        return a.x - b.x > RELATION_MARGIN
    if relation == "above":
        return b.y - a.y > RELATION_MARGIN
    return a.y - b.y > RELATION_MARGIN


def is_at(a: SceneObject, position: str) -> bool:
    """Return whether `a` is in the middle, at the top, at the bottom, on the left or on the right of the image."""
    if position == "middle":
        return abs(a.x - 0.5) < MIDDLE and abs(a.y - 0.5) < MIDDLE
    if position == "top":
        return a.y < EDGE
    if position == "bottom":
        return a.y > 1 - EDGE
    return a.x < EDGE if position == "left" else a.x > 1 - EDGE


def sample_scene(rng: np.random.Generator, *, image_id: str, split: str, side: int) -> Scene:
    """Draw a scene of 2 to 8 objects.

    Shapes and colors cluster (their weights are Dirichlet draws), so that counts vary widely and unique objects
    are common in small scenes. An object is skipped if no position leaves enough of every object visible.
    """
    shape_weights = rng.dirichlet([1.0] * len(SHAPES))
    # Below 1 the weights are less even, so a scene repeats few colors.
    color_weights = rng.dirichlet([0.8] * len(COLORS))
    # Objects of a crowded scene may overlap; in others they keep a distance.
    crowded = rng.random() < 0.45
    count = MIN_OBJECTS + int(rng.choice(len(OBJECT_COUNTS), p=OBJECT_COUNTS))
    placed: list[SceneObject] = []
    masks: list[NDArray[np.bool_]] = []
    for _ in range(count):
        shape = SHAPES[rng.choice(len(SHAPES), p=shape_weights)]
        color = COLORS[rng.choice(len(COLORS), p=color_weights)]
        texture = TEXTURES[rng.choice(len(TEXTURES), p=[0.5, 0.25, 0.25])]
        size = SIZES[int(rng.random() < 0.4)]
        # An object without a place after 40 tries is left out.
        for attempt in range(40):
            if attempt == 25:  # a small object may still fit
                size = "small"
            radius = rng.uniform(*_RADIUS[size])
            # Corners reach up to a third beyond the nominal radius.
            margin = radius * 1.3
            # Rounded before anything is drawn, so scenes.jsonl has exactly the numbers of the image.
            new = SceneObject(
                shape=shape,
                color=color,
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
            mask = shape_mask(new.points(side), side)
            # Each earlier object is covered by all later ones and the new one.
            if all(_visible(m, [*masks[i + 1 :], mask]) >= MIN_VISIBLE for i, m in enumerate(masks)):
                placed.append(new)
                masks.append(mask)
                break
    objects = tuple(_with_visible_part(o, masks[i], masks[i + 1 :]) for i, o in enumerate(placed))
    return Scene(image_id=image_id, split=split, side=side, objects=objects)


def _touch(a: SceneObject, b: SceneObject) -> bool:
    return math.hypot(a.x - b.x, a.y - b.y) < 1.2 * (a.radius + b.radius)


def _visible(mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> float:
    return np.count_nonzero(_uncovered(mask, above)) / np.count_nonzero(mask)


def _uncovered(mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    for other in above:
        mask = mask & ~other
    return mask


def _with_visible_part(a: SceneObject, mask: NDArray[np.bool_], above: list[NDArray[np.bool_]]) -> SceneObject:
    """Return `a` with the bounding box and the share of its visible pixels."""
    visible = _uncovered(mask, above)
    rows, columns = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    # Exclusive ends: one after the last visible column and row. `MIN_VISIBLE` leaves at least one of each.
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    return dataclasses.replace(a, box=box, visible=round(float(np.count_nonzero(visible) / np.count_nonzero(mask)), 3))


Point = tuple[float, float]

# Circumradius over nominal radius, so that the four shapes cover similar areas (a star is thin, a square is full).
_REACH = {"circle": 1.0, "square": 1.22, "triangle": 1.32, "star": 1.34}
_STAR_WAIST = 0.5  # inner over outer radius
_CIRCLE_POINTS = 48


def shape_corners(shape: str, x: float, y: float, radius: float, angle: float) -> list[Point]:
    """Return the corners of a shape around (x, y), in pixels; `angle` in radians rotates it clockwise on the screen."""
    reach = radius * _REACH[shape]
    # The number of corners, the radii that alternate between them, and the direction of the first one.
    if shape == "circle":
        corners, radii, first = _CIRCLE_POINTS, [reach], 0.0
    elif shape == "square":
        corners, radii, first = 4, [reach], math.pi / 4
    elif shape == "triangle":
        corners, radii, first = 3, [reach], -math.pi / 2
    else:
        corners, radii, first = 10, [reach, reach * _STAR_WAIST], -math.pi / 2
    return [
        (
            x + radii[k % len(radii)] * math.cos(first + angle + 2 * math.pi * k / corners),
            y + radii[k % len(radii)] * math.sin(first + angle + 2 * math.pi * k / corners),
        )
        for k in range(corners)
    ]


def shape_mask(points: list[Point], size: int) -> NDArray[np.bool_]:
    """Return bool [size, size]: the pixels inside a polygon."""
    mask = Image.new("L", (size, size))
    ImageDraw.Draw(mask).polygon(points, fill=1)
    return np.asarray(mask, dtype=bool)


Floats = NDArray[np.floating[Any]]

SUPERSAMPLING = 3
_RGB = {  # 0-255; each object's color varies a little around these
    "red": (214, 40, 44),
    "yellow": (246, 205, 40),
    "green": (46, 160, 67),
    "blue": (38, 104, 214),
    "purple": (142, 58, 180),
    "black": (42, 42, 46),
}
_SECOND = {"black": 0.62}  # how far a texture's second tone is shifted towards white
_STRIPES = 4.2  # pixels per pair of stripes, at a side of 128; dots are slightly farther apart


def render(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draw a scene as an RGB image of `side` x `side` pixels; `rng` decides what the scene graph leaves open."""
    # Objects are painted at three times the size and averaged down, which smooths their edges.
    side, big = scene.side, scene.side * SUPERSAMPLING
    # (3, side, side) * (side, side)
    ground = _background(side, rng) * _shadows(scene)
    canvas = _to_image(ground).resize((big, big), Image.Resampling.BILINEAR)
    for item in scene.objects:
        _paint(canvas, item, big, rng)
    pixels = np.asarray(canvas.reduce(SUPERSAMPLING), dtype=np.float32)
    # Sensor noise, whose strength differs between images.
    noise = rng.standard_normal((side, side, 3), dtype=np.float32) * np.float32(rng.uniform(1.5, 6.0))
    noise += pixels
    return Image.fromarray(np.clip(noise, 0, 255, out=noise).astype(np.uint8))


def _to_image(planes: Floats) -> Image.Image:
    """Return [3, height, width] as an RGB image. NumPy computes on planes faster than on interleaved colors."""
    return Image.merge("RGB", [Image.fromarray(plane) for plane in np.clip(planes, 0, 255).astype(np.uint8)])


def _paint(canvas: Image.Image, item: SceneObject, big: int, rng: np.random.Generator) -> None:
    """Paste one object onto the supersampled canvas."""
    points = item.points(big)
    # Room around the shape for the line along its edge.
    border = 2 * SUPERSAMPLING
    # Only the object's surroundings are drawn, in coordinates of that patch.
    columns, rows = zip(*points, strict=True)
    x1, y1 = (max(0, int(min(values)) - border) for values in (columns, rows))
    x2, y2 = (min(big, int(max(values)) + border) for values in (columns, rows))
    local = [(x - x1, y - y1) for x, y in points]
    base = np.clip(np.array(_RGB[item.color]) + rng.uniform(-14, 14, 3), 0, 255).astype(np.float32)
    height, width = y2 - y1, x2 - x1
    tones = _tones(item, base, (height, width), big, rng)
    # Light falls from the upper left.
    light = 1.12 - 0.24 * (np.linspace(0, 1, height)[:, None] + np.linspace(0, 1, width)[None, :]) / 2
    patch = _to_image(tones * light)
    edge = tuple(int(v) for v in base * 0.55)
    # Two points beyond the start, so that the last corner is joined like the others.
    ImageDraw.Draw(patch).line([*local, local[0], local[1]], fill=edge, width=2 * SUPERSAMPLING, joint="curve")
    # The mask cuts off the outer half of the line along the edge.
    mask = Image.new("L", patch.size)
    ImageDraw.Draw(mask).polygon(local, fill=255)
    canvas.paste(patch, (x1, y1), mask)


def _tones(item: SceneObject, base: Floats, shape: tuple[int, int], big: int, rng: np.random.Generator) -> Floats:
    """Return float32 [3, height, width], or [3, 1, 1] if it is the same everywhere: the object's own color, with
    stripes or dots of a lighter tone.
    """
    tones = base[:, None, None]
    if item.texture == "solid":
        return tones
    second = tones + (255 - tones) * np.float32(_SECOND.get(item.color, 0.68))
    rows, columns = (np.arange(number, dtype=np.float32) for number in shape)
    angle, phase = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2)
    # Waves along the angle make stripes; waves along and across it make dots.
    pitch = 2 * np.pi / (_STRIPES * big / 128 * rng.uniform(1.0, 1.25))
    along = np.add.outer(rows * np.sin(angle), columns * np.cos(angle)) * pitch + phase[0]
    if item.texture == "striped":
        lit = np.sin(along * 0.8) > 0.1
    else:
        across = np.subtract.outer(rows * np.cos(angle), columns * np.sin(angle)) * pitch + phase[1]
        lit = np.sin(along * 0.8) + np.sin(across * 0.8) > 0.75
    return np.where(lit, second, tones)


def _shadows(scene: Scene) -> Floats:
    """Return float32 [side, side]: how much light reaches the ground, 1 outside the objects' soft shadows."""
    side = scene.side
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    # Shadows fall to the lower right, away from the light.
    shift = 0.016 * side
    for item in scene.objects:
        draw.polygon([(x + shift, y + shift) for x, y in item.points(side)], fill=255)
    blurred = np.asarray(mask.filter(ImageFilter.BoxBlur(side / 64)), dtype=np.float32)
    return 1 - 0.34 * blurred / 255


def _background(side: int, rng: np.random.Generator) -> Floats:
    """Return float32 [3, side, side]: two muted colors mixed by one of seven patterns, plus faint grain."""
    first, second = _muted(rng)[:, None, None], _muted(rng)[:, None, None]
    columns = np.arange(side, dtype=np.float32)[None, :] / side
    rows = columns.T
    kind, angle = rng.integers(7), rng.uniform(0, 2 * np.pi)
    # A coordinate along a random direction, 0 in the center and at most 0.71 at a corner.
    ramp = (columns - 0.5) * np.cos(angle) + (rows - 0.5) * np.sin(angle)
    mix: Floats
    if kind == 0:
        mix = np.zeros((side, side))
    elif kind == 1:
        mix = ramp + 0.5
    elif kind == 2:
        mix = np.hypot(columns - rng.uniform(0.2, 0.8), rows - rng.uniform(0.2, 0.8)) * 1.3
    elif kind == 3:  # broad soft stripes
        mix = 0.35 + 0.25 * np.sin(ramp * 2 * np.pi * rng.uniform(2, 6))
    elif kind == 4:  # checks
        cell = rng.integers(3, 8)
        mix = 0.4 * ((np.floor(columns * cell) + np.floor(rows * cell)) % 2)
    elif kind == 5:  # horizon
        mix = 0.7 / (1 + np.exp(-(rows - rng.uniform(0.35, 0.75)) * 40)) + 0.2 * rows
    else:  # clouds
        mix = _clouds(side, int(rng.integers(3, 9)), rng)
    mix = np.clip(mix + 0.06 * (_clouds(side, 24, rng) - 0.5), 0, 1)
    return ((1 - mix) * first + mix * second).astype(np.float32)


def _clouds(side: int, cells: int, rng: np.random.Generator) -> Floats:
    coarse = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32) / 255


def _muted(rng: np.random.Generator) -> Floats:
    """Return a color that no object has: pale and light."""
    hue, saturation, value = rng.random(), rng.uniform(0.03, 0.26), rng.uniform(0.62, 0.97)
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255
