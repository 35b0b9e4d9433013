"""Scenes as pictures: a varied background, shaded and textured objects, anti-aliased, with sensor noise."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from vlp_models.synthetic.scenes.world import Scene, SceneObject

Floats = NDArray[np.floating[Any]]

SUPERSAMPLING = 3
_RGB = {  # 0-255; each object's colour varies a little around these
    "red": (214, 40, 44),
    "yellow": (246, 205, 40),
    "green": (46, 160, 67),
    "blue": (38, 104, 214),
    "purple": (142, 58, 180),
    "black": (42, 42, 46),
}
_SECOND = {"black": 0.62}  # how far a texture's second tone goes towards white; black needs more to show
_STRIPES = 4.2  # pixels a stripe pair, at a side of 128; dots are a little wider apart


def render(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draws a scene as an RGB image of `side` x `side` pixels; `rng` decides everything the scene graph does not."""
    side, big = scene.side, scene.side * SUPERSAMPLING
    ground = _background(side, rng) * _shadows(scene)[:, :, None]
    canvas = Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8)).resize((big, big), Image.Resampling.BILINEAR)
    for item in scene.objects:
        _paint(canvas, item, big, rng)
    pixels = np.asarray(canvas.reduce(SUPERSAMPLING), dtype=np.float32)
    noise = rng.standard_normal((side, side, 3), dtype=np.float32) * np.float32(rng.uniform(1.5, 6.0))
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _paint(canvas: Image.Image, item: SceneObject, big: int, rng: np.random.Generator) -> None:
    """Pastes one object onto the supersampled canvas."""
    points = item.points(big)
    border = 2 * SUPERSAMPLING
    x1, y1 = (max(0, int(min(p[axis] for p in points)) - border) for axis in (0, 1))
    x2, y2 = (min(big, int(max(p[axis] for p in points)) + border) for axis in (0, 1))
    local = [(x - x1, y - y1) for x, y in points]
    base = np.clip(np.array(_RGB[item.colour]) + rng.uniform(-14, 14, 3), 0, 255).astype(np.float32)
    tones = _tones(item, base, (y2 - y1, x2 - x1), big, rng)
    # Light falls from the upper left.
    height, width = tones.shape[:2]
    light = 1.12 - 0.24 * (np.linspace(0, 1, height)[:, None] + np.linspace(0, 1, width)[None, :]) / 2
    patch = Image.fromarray(np.clip(tones * light[:, :, None], 0, 255).astype(np.uint8))
    edge = tuple(int(v) for v in base * 0.55)
    ImageDraw.Draw(patch).line([*local, local[0], local[1]], fill=edge, width=2 * SUPERSAMPLING, joint="curve")
    mask = Image.new("L", patch.size)
    ImageDraw.Draw(mask).polygon(local, fill=255)
    canvas.paste(patch, (x1, y1), mask)


def _tones(item: SceneObject, base: Floats, shape: tuple[int, int], big: int, rng: np.random.Generator) -> Floats:
    """float32 [height, width, 3]: the object's own colour, with stripes or dots of a lighter tone."""
    tones = np.broadcast_to(base, (*shape, 3))
    if item.texture == "solid":
        return tones
    second = base + (255 - base) * np.float32(_SECOND.get(item.colour, 0.68))
    rows, columns = np.mgrid[: shape[0], : shape[1]].astype(np.float32)
    angle, phase = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2)
    pitch = 2 * np.pi / (_STRIPES * big / 128 * rng.uniform(1.0, 1.25))
    along = (columns * np.cos(angle) + rows * np.sin(angle)) * pitch + phase[0]
    if item.texture == "striped":
        lit = np.sin(along * 0.8) > 0.1
    else:
        across = (rows * np.cos(angle) - columns * np.sin(angle)) * pitch + phase[1]
        lit = np.sin(along * 0.8) + np.sin(across * 0.8) > 0.75
    return np.where(lit[:, :, None], second, tones)


def _shadows(scene: Scene) -> Floats:
    """float32 [side, side]: how much light reaches the ground, 1 outside the objects' soft shadows."""
    side = scene.side
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    shift = 0.016 * side
    for item in scene.objects:
        draw.polygon([(x + shift, y + shift) for x, y in item.points(side)], fill=255)
    blurred = np.asarray(mask.filter(ImageFilter.BoxBlur(side / 64)), dtype=np.float32)
    return 1 - 0.34 * blurred / 255


def _background(side: int, rng: np.random.Generator) -> Floats:
    """float32 [side, side, 3]: two muted colours mixed by one of seven patterns, plus low grain."""
    first, second = _muted(rng), _muted(rng)
    rows, columns = np.mgrid[:side, :side].astype(np.float32) / side
    kind, angle = rng.integers(7), rng.uniform(0, 2 * np.pi)
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
    mix = np.clip(mix + 0.06 * (_clouds(side, 24, rng) - 0.5), 0, 1)[:, :, None]
    return ((1 - mix) * first + mix * second).astype(np.float32)


def _clouds(side: int, cells: int, rng: np.random.Generator) -> Floats:
    coarse = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32) / 255


def _muted(rng: np.random.Generator) -> Floats:
    """A colour that no object has: pale and light."""
    hue, saturation, value = rng.random(), rng.uniform(0.03, 0.26), rng.uniform(0.62, 0.97)
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value)) * 255
