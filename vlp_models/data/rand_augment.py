"""RandAugment (Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space"), without
the operations that change what colour a thing has: a caption that names it would lie.

Pillow does the work, an explicit generator draws: the same draw gives the same picture in any process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

COUNT: Final = 2  # operations drawn for a picture
SHARE: Final = 0.5  # of the drawn that are applied
STRENGTH: Final = 0.7  # of the strongest; the public code of VLMo writes it as 7 of 10
GREY: Final = (128, 128, 128)  # what comes in from outside the picture

Operation = Callable[[Image.Image, float], Image.Image]


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=GREY)


# From the strongest to the left to the strongest to the right: the argument is between -1 and 1.
OPERATIONS: Final[dict[str, Operation]] = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    "shear_x": lambda image, strength: _affine(image, (1, 0.3 * strength, 0, 0, 1, 0)),
    "shear_y": lambda image, strength: _affine(image, (1, 0, 0, 0.3 * strength, 1, 0)),
    "translate_x": lambda image, strength: _affine(image, (1, 0, 0.45 * strength * image.width, 0, 1, 0)),
    "translate_y": lambda image, strength: _affine(image, (1, 0, 0, 0, 1, 0.45 * strength * image.height)),
    "rotate": lambda image, strength: image.rotate(30 * strength, Image.Resampling.BILINEAR, fillcolor=GREY),
}


def rand_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The RGB picture after `COUNT` drawn operations, each applied with probability `SHARE`; of the same size."""
    names = list(OPERATIONS)
    for _ in range(COUNT):
        operation = OPERATIONS[names[int(rng.integers(len(names)))]]
        strength = STRENGTH * (1 if rng.random() < 0.5 else -1)
        if rng.random() < SHARE:
            image = operation(image, strength)
    return image
