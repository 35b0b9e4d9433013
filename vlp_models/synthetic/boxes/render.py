"""Draws a scene of boxes as NLVR's 400x100 PNGs look.

Three light grey boxes of 100 pixels, 50 pixels of dark grey between them. Colours and edges were measured on
NLVR's training images; squares are sharp, circles and triangles are smoothed.
"""

from __future__ import annotations

from functools import cache

from PIL import Image, ImageDraw

from vlp_models.synthetic.boxes.scene import BOX, Scene

WIDTH, HEIGHT, STRIDE = 400, 100, 150
_PAINT = {"yellow": (255, 255, 0), "black": (0, 0, 0), "blue": (0, 153, 255)}
_BACKGROUND, _SEPARATOR = (211, 211, 211), (128, 128, 128)
_SMOOTH = 8  # each pixel averages 8x8 samples


def draw(scene: Scene, order: tuple[int, int, int] = (0, 1, 2)) -> Image.Image:
    """The scene as an RGB image, box `order[0]` leftmost."""
    image = Image.new("RGB", (WIDTH, HEIGHT), _SEPARATOR)
    for slot, index in enumerate(order):
        left = slot * STRIDE
        image.paste(_BACKGROUND, (left, 0, left + BOX, HEIGHT))
        for item in scene.boxes[index]:
            image.paste(_PAINT[item.colour], (left + item.x, item.y), _stamp(item.shape, item.size))
    return image


@cache
def _stamp(shape: str, size: int) -> Image.Image:
    """How much of each pixel the shape covers, 0 to 255."""
    big = size * _SMOOTH
    mask = Image.new("L", (big, big), 0)
    pen = ImageDraw.Draw(mask)
    if shape == "square":
        pen.rectangle((0, 0, big, big), fill=255)
    elif shape == "circle":
        pen.ellipse((0, 0, big - 1, big - 1), fill=255)
    else:
        pen.polygon([(big / 2 - 0.5, 0), (big - 1, big - 1), (0, big - 1)], fill=255)
    return mask.resize((size, size), Image.Resampling.BOX)
