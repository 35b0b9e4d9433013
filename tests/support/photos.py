"""Images with as much detail as a photo: light, coarse and fine texture, and objects with edges."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw


def photo(seed: int, size: tuple[int, int] = (200, 150)) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = np.zeros((size[1], size[0], 3))
    for cells, weight in ((3, 90), (12, 40), (48, 25)):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), np.uint8))
        image += weight / 255 * np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    picture = Image.fromarray(np.clip(image + 30, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(12):
        middle = rng.uniform(0, 1, 2) * size
        corners = [tuple(middle + rng.normal(0, 18, 2)) for _ in range(rng.integers(3, 6))]
        draw.polygon(corners, fill=tuple(int(v) for v in rng.integers(0, 256, 3)))
    return picture
