"""Image files to tensors: decode, augment, fit, normalise. What a pixel model asks for is its `PixelInput`.

Pillow does the work: the same file, settings and draw give the same pixels in any process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vlp_models.data.batch import Pixels
from vlp_models.data.images import ImageError, as_seen, open_checked, undecodable
from vlp_models.data.rand_augment import rand_augment
from vlp_models.data.shards.archive import MAX_IMAGE_PIXELS
from vlp_models.errors import DataError

if TYPE_CHECKING:
    from vlp_models.data.inputs import PixelInput

RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop
ATTEMPTS = 10  # to place one, before the centre is taken
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

Box = tuple[int, int, int, int]  # left, top, right, bottom


def decode(data: bytes, where: str) -> Image.Image:
    """An image file's picture, RGB, as people see it; its size is judged by the header, before anything is decoded.

    Args:
        where: for the error.

    Raises:
        DataError: no image, damaged, or of more than `MAX_IMAGE_PIXELS` pixels.
    """
    try:
        with open_checked(data, "", MAX_IMAGE_PIXELS) as image:
            try:
                return as_seen(image)
            except Exception as error:  # Pillow's plugins raise anything on hostile files
                raise undecodable(error) from None
    except ImageError as error:
        raise DataError(f"{where}: {error}; `dvc repro shards` packs the pictures anew") from None


def encode(image: Image.Image) -> bytes:
    """A picture as a file that `decode` gives back as it was."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def collate_pixels(images: Sequence[Image.Image], wanted: PixelInput, draws: Sequence[int | None]) -> Pixels:
    """Fitted, normalised pictures; those with a draw are augmented.

    Args:
        images: RGB.
        draws: of each picture, the seed of what chance decides; None leaves nothing to chance.
    """
    fitted = [fit(image, wanted, draw) for image, draw in zip(images, draws, strict=True)]
    pixels_BHW3 = np.stack([pixels for pixels, _ in fitted])
    pixels_B3HW = torch.from_numpy(pixels_BHW3).permute(0, 3, 1, 2).float().div(255)
    mean, std = (torch.tensor(values)[:, None, None] for values in (wanted.mean, wanted.std))
    pixels_B3HW = pixels_B3HW.sub(mean).div(std)
    if wanted.resize != "pad":
        return Pixels(pixels_B3HW=pixels_B3HW.contiguous())
    mask_BHW = torch.from_numpy(np.stack([mask for _, mask in fitted]))
    return Pixels(pixels_B3HW=pixels_B3HW.mul(mask_BHW[:, None]).contiguous(), mask_BHW=mask_BHW)


def fit(image: Image.Image, wanted: PixelInput, draw: int | None) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """uint8 [H, W, 3] of the wanted size, and bool [H, W]: where there is picture and no padding."""
    flipped, rng = False, None
    if draw is not None:
        rng = np.random.default_rng(draw)
        if "random_resized_crop" in wanted.augment:
            image = image.crop(random_box(image.width, image.height, wanted.crop_scale, rng))
        flipped = "flip" in wanted.augment and rng.random() < 0.5
    if wanted.resize == "crop" and not (draw is not None and "random_resized_crop" in wanted.augment):
        image = _cover(image, wanted)
    elif wanted.resize == "pad":
        image = _resized(image, _padded_factor(image, wanted), wanted)
    else:
        image = image.resize((wanted.width, wanted.height), FILTERS[wanted.interpolation])
    if flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng is not None and "rand_augment" in wanted.augment:
        image = rand_augment(image, rng)
    pixels = np.zeros((wanted.height, wanted.width, 3), np.uint8)
    mask = np.zeros((wanted.height, wanted.width), bool)
    pixels[: image.height, : image.width] = np.asarray(image)
    mask[: image.height, : image.width] = True
    return pixels, mask


def place_boxes(boxes_N4: NDArray[np.float32], image: Image.Image, wanted: PixelInput) -> NDArray[np.float32]:
    """Where boxes of a picture are once `fit` has made it the wanted size, nothing left to chance.

    Args:
        boxes_N4: x1, y1, x2, y2 in pixels of the picture.

    Returns:
        float32, pixels of the wanted size; outside of it where the picture is cut off.
    """
    size = np.array([wanted.width, wanted.height] * 2, np.float32)
    own = np.array([image.width, image.height] * 2, np.float32)
    if wanted.resize == "squash":
        placed = boxes_N4 * (size / own)
    elif wanted.resize == "pad":
        placed = boxes_N4 * _padded_factor(image, wanted)
    else:
        factor = max(wanted.width / image.width, wanted.height / image.height)
        placed = boxes_N4 * factor - (own * factor - size) / 2
    return placed.astype(np.float32)


def random_box(width: int, height: int, scale: tuple[float, float], rng: np.random.Generator) -> Box:
    """A part of an image: its share of the area evenly from `scale`, its ratio log-evenly from `RATIOS` (Szegedy et
    al., "Going Deeper with Convolutions", section 6)."""
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * RATIOS[1]))), min(height, max(1, round(width / RATIOS[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _cover(image: Image.Image, wanted: PixelInput) -> Image.Image:
    """The smallest size of the same shape that covers what is wanted, and of that the middle."""
    image = _resized(image, max(wanted.width / image.width, wanted.height / image.height), wanted)
    left, top = round((image.width - wanted.width) / 2), round((image.height - wanted.height) / 2)
    return image.crop((left, top, left + wanted.width, top + wanted.height))


def _padded_factor(image: Image.Image, wanted: PixelInput) -> float:
    """How much larger the picture becomes, so that it keeps within the size and within the limits of its sides."""
    factors = [wanted.width / image.width, wanted.height / image.height]
    sides = (wanted.longer, max(image.size)), (wanted.shorter, min(image.size))
    return min(factors + [limit / side for limit, side in sides if limit])


def _resized(image: Image.Image, factor: float, wanted: PixelInput) -> Image.Image:
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.resize(size, FILTERS[wanted.interpolation])
