"""The outlines of the four shapes, and which pixels they cover."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Point = tuple[float, float]

# Circumradius over nominal radius, so that the four shapes cover similar areas (a star is thin, a square is full).
_REACH = {"circle": 1.0, "square": 1.22, "triangle": 1.32, "star": 1.34}
_STAR_WAIST = 0.5  # inner over outer radius
_CIRCLE_POINTS = 48


def outline(shape: str, x: float, y: float, radius: float, angle: float) -> list[Point]:
    """The corners of a shape around (x, y), in pixels; `angle` in radians turns it clockwise on the screen."""
    reach = radius * _REACH[shape]
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


def covered(points: list[Point], size: int) -> NDArray[np.bool_]:
    """bool [size, size]: the pixels inside an outline."""
    mask = Image.new("L", (size, size))
    ImageDraw.Draw(mask).polygon(points, fill=1)
    return np.asarray(mask, dtype=bool)
