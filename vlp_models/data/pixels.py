"""Image files to pixel tensors: decode, augment, resize, normalize. `PixelInput` describes what a pixel model reads.

Pillow does the image operations and an explicit generator makes the random choices, so the same file, settings and
seed give the same pixels in any process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from vlp_models.data.batch import Pixels, Placement
from vlp_models.data.images import MAX_IMAGE_PIXELS, ImageError, decode_error, open_checked, to_upright_rgb
from vlp_models.errors import DataError

CROP_RATIOS: Final = (3 / 4, 4 / 3)  # width to height of a random crop
CROP_ATTEMPTS: Final = 10  # to place a random crop; then the center crop is used
MAX_STRIP: Final = 64  # times the requested area; of an image that would be larger, only the window is resized
FILTERS: Final = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

AUGMENT_COUNT: Final = 2  # RandAugment: operations drawn per image
AUGMENT_PROBABILITY: Final = 0.5  # that a drawn operation is applied
AUGMENT_STRENGTH: Final = 0.7  # fraction of the strongest; VLMo's public code uses 7 of 10
GRAY: Final = (128, 128, 128)  # fill color for what is moved in from outside the image

Box = tuple[int, int, int, int]  # left, top, right, bottom
Matrix = NDArray[np.float64]  # [3, 3], maps points (x, y, 1)
Augmentation = Literal["random_resized_crop", "flip", "rand_augment"]


@dataclass(frozen=True, kw_only=True)
class PixelInput:
    """Images as pixels, decoded when a batch is made.

    height, width    in pixels, after resizing
    resize           squash: resize both sides. crop: resize the shorter side, then crop the center.
                     pad: fit the longer side and mask the rest
    longer, shorter  with `pad`: largest number of pixels of the longer and the shorter side; 0: no limit
    rounding         of sizes and offsets with `crop`: nearest; down, as in CLIP's processor; size_down, as torchvision
    interpolation    of the resizing
    mean, std        per channel, for values from 0 to 1
    augment          in training, as a function of (seed, epoch, sample): any of `Augmentation`. `flip` is off by
                     default because it makes captions with "left" or "right" wrong
    crop_scale       with random_resized_crop: smallest and largest fraction of the area that is kept
    patch            side of the model's patches in pixels; 0: no patches. `validate.min_image_side` must be at least
                     this, so that no image is enlarged beyond its content
    """

    height: int
    width: int
    resize: Literal["squash", "crop", "pad"] = "squash"
    longer: int = 0
    shorter: int = 0
    rounding: Literal["nearest", "down", "size_down"] = "nearest"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    augment: tuple[Augmentation, ...] = ()
    crop_scale: tuple[float, float] = (0.5, 1.0)
    patch: int = 0

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"invalid image input: {self.width}x{self.height} pixels, std {self.std}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale {self.crop_scale}: expected two fractions of the area, the smaller one first")


def decode(data: bytes, where: str) -> Image.Image:
    """Return the upright RGB image of an image file. Its size is checked in the header, before anything is decoded.

    Args:
        where: names the image in the error.

    Raises:
        DataError: not an image, damaged, or more than `MAX_IMAGE_PIXELS` pixels.
    """
    try:
        with open_checked(data, MAX_IMAGE_PIXELS) as image:
            try:
                return to_upright_rgb(image)
            except Exception as error:  # Pillow's plugins raise anything on hostile files
                raise decode_error(error) from None
    except ImageError as error:
        raise DataError(f"{where}: {error}; run `dvc repro shards` to pack the images again") from None


def encode(image: Image.Image) -> bytes:
    """Return the image as a PNG file, which `decode` reads back losslessly."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def collate_pixels(images: Sequence[Image.Image], config: PixelInput, seeds: Sequence[int | None]) -> Pixels:
    """Resize and normalize RGB images into one batch; augment those with a seed.

    Args:
        seeds: per image, the seed of its random augmentation; None: no augmentation.
    """
    fitted = [fit(image, config, seed) for image, seed in zip(images, seeds, strict=True)]
    # (B, H, W, 3) uint8 -> (B, 3, H, W) float32
    pixels_BHW3 = np.stack([fitted_image.pixels for fitted_image in fitted])
    pixels_B3HW = torch.from_numpy(pixels_BHW3).permute(0, 3, 1, 2).float().div(255)
    # [3, 1, 1]
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
    pixels_B3HW = pixels_B3HW.sub(mean).div(std)
    placement = None  # squashed images fill the input
    if config.resize != "squash" or (config.augment and any(seed is not None for seed in seeds)):
        placement = _placement(images, fitted)
    if config.resize != "pad":
        return Pixels(pixels_B3HW=pixels_B3HW.contiguous(), placement=placement)
    mask_BHW = torch.from_numpy(np.stack([fitted_image.mask for fitted_image in fitted]))
    # Zero after normalization: padding is the mean color.
    return Pixels(pixels_B3HW=pixels_B3HW.mul(mask_BHW[:, None]).contiguous(), mask_BHW=mask_BHW, placement=placement)


class Fitted(NamedTuple):
    """An image as a model reads it.

    pixels  uint8 [H, W, 3], of the requested size
    mask    bool [H, W]; True where it is not padding
    matrix  [3, 3]; maps a point of the image, (x, y, 1) in pixels, to its position in `pixels`
    window  left, top, right, bottom of the part that was not cropped, in pixels of the image
    """

    pixels: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    matrix: Matrix
    window: tuple[float, float, float, float]


def fit(image: Image.Image, config: PixelInput, seed: int | None) -> Fitted:
    """Resize an RGB image to what a model reads; with a seed, augment it."""
    matrix, rng, flipped, resize = np.eye(3), None, False, config.resize
    window: tuple[float, float, float, float] = (0, 0, image.width, image.height)
    if seed is not None:
        # One generator per image, seeded: the same choices in every process.
        rng = np.random.default_rng(seed)
        # the order of random choices must not change: crop, flip, RandAugment
        if "random_resized_crop" in config.augment:
            window = box = random_box(image.width, image.height, config.crop_scale, rng)
            image, matrix = image.crop(box), _shift(-box[0], -box[1])
            # The crop has the size that was drawn: squash it instead of cropping it a second time.
            resize = "squash" if resize == "crop" else resize
        flipped = "flip" in config.augment and rng.random() < 0.5

    # resize: x and y are factors; the center crop starts at left, top of the resized image
    size, (left, top) = _resizing(image, config, resize)
    x, y = size[0] / image.width, size[1] / image.height
    matrix = _shift(-left, -top) @ _scale(x, y) @ matrix
    resampling = FILTERS[config.interpolation]
    if resize == "crop":
        # Where the center crop lies in the image before it was resized.
        window = (left / x, top / y, (left + config.width) / x, (top + config.height) / y)
        # of a long strip, resize the window alone: the whole one could be huge
        if size[0] * size[1] > MAX_STRIP * config.width * config.height:
            window_in_image = (window[0], window[1], min(window[2], image.width), min(window[3], image.height))
            image = image.resize((config.width, config.height), resampling, box=window_in_image)
        else:
            image = image.resize(size, resampling).crop((left, top, left + config.width, top + config.height))
    else:
        image = image.resize(size, resampling)
    if flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        # x -> width - x.
        matrix = _shift(image.width, 0) @ _scale(-1, 1) @ matrix
    if rng is not None and "rand_augment" in config.augment:
        image, augmented = rand_augment(image, rng)
        matrix = augmented @ matrix
    # a padded image is in the upper left corner
    # Zeros where the image is smaller than the input; the mask is False there.
    pixels = np.zeros((config.height, config.width, 3), np.uint8)
    mask = np.zeros((config.height, config.width), bool)
    pixels[: image.height, : image.width] = np.asarray(image)
    mask[: image.height, : image.width] = True
    return Fitted(pixels, mask, matrix, window)


def _placement(images: Sequence[Image.Image], fitted: Sequence[Fitted]) -> Placement:
    """Return where the images are, as fractions of their sizes."""
    sizes = [np.array([image.width, image.height], np.float64) for image in images]
    matrices, windows = [], []
    for size, image in zip(sizes, fitted, strict=True):
        # pixels of the input -> pixels of the image -> fractions; the last row of the matrix is (0, 0, 1)
        matrices.append((_scale(*(1 / size)) @ np.linalg.inv(image.matrix))[:2])
        windows.append(np.array(image.window) / np.tile(size, 2))
    to_image_B23, window_B4 = np.stack(matrices), np.stack(windows)
    return Placement(to_image_B23=torch.from_numpy(to_image_B23).float(), window_B4=torch.from_numpy(window_B4).float())


def place_boxes(boxes_N4: NDArray[np.float32], image: Image.Image, config: PixelInput) -> NDArray[np.float32]:
    """Map boxes of an image to where `fit` without augmentation puts them.

    Augmented images: data/boxes.py.

    Args:
        boxes_N4: x1, y1, x2, y2 in pixels of the image.

    Returns:
        float32 [N, 4], pixels of the requested size; outside of it where the image is cropped.
    """
    size, corner = _resizing(image, config, config.resize)
    # boxes have x and y twice
    factor = np.array(size * 2, np.float32) / np.array(image.size * 2, np.float32)
    return (boxes_N4 * factor - np.array(corner * 2, np.float32)).astype(np.float32)


def random_box(width: int, height: int, scale: tuple[float, float], rng: np.random.Generator) -> Box:
    """Draw a crop: area uniform in `scale`, aspect ratio log-uniform in `CROP_RATIOS`.

    Szegedy et al., "Going Deeper with Convolutions", section 6.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(CROP_RATIOS[0]), math.log(CROP_RATIOS[1])))
        # w * h = area, w / h = ratio
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return left, top, left + w, top + h
    # no attempt fits: the center crop with the nearest allowed ratio
    w, h = min(width, max(1, round(height * CROP_RATIOS[1]))), min(height, max(1, round(width / CROP_RATIOS[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _resizing(
    image: Image.Image, config: PixelInput, resize: Literal["squash", "crop", "pad"]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the width and height to resize an image to, and the left and top of the center crop (0, 0 without)."""
    if resize == "squash":
        return (config.width, config.height), (0, 0)
    if resize == "crop" and config.rounding != "nearest":
        # The side that fills the target exactly, and the other one in whole pixels, without an error of floats.
        target, side = max(
            (config.width, image.width), (config.height, image.height), key=lambda pair: pair[0] / pair[1]
        )
        size = image.width * target // side, image.height * target // side
        margins = size[0] - config.width, size[1] - config.height
        left, top = (m // 2 if config.rounding == "down" else round(m / 2) for m in margins)
        return size, (left, top)
    factors = [config.width / image.width, config.height / image.height]
    if resize == "crop":
        # the smallest size of the same aspect ratio that covers the target
        factor = max(factors)
    else:
        # the largest one that fits into the target and into the limits of both sides
        sides = (config.longer, max(image.size)), (config.shorter, min(image.size))
        factor = min(factors + [limit / side for limit, side in sides if limit])
    width, height = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    if resize == "pad":
        return (width, height), (0, 0)
    return (width, height), (round((width - config.width) / 2), round((height - config.height) / 2))


def _scale(x: float, y: float) -> Matrix:
    return np.diag([x, y, 1.0])


def _shift(x: float, y: float) -> Matrix:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=GRAY)


# name -> operation on (image, strength from -1 to 1)
OPERATIONS: Final[dict[str, Callable[[Image.Image, float], Image.Image]]] = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    "shear_x": lambda image, strength: _affine(image, (1, 0.3 * strength, 0, 0, 1, 0)),
    "shear_y": lambda image, strength: _affine(image, (1, 0, 0, 0.3 * strength, 1, 0)),
    "translate_x": lambda image, strength: _affine(image, (1, 0, 0.45 * strength * image.width, 0, 1, 0)),
    "translate_y": lambda image, strength: _affine(image, (1, 0, 0, 0, 1, 0.45 * strength * image.height)),
    "rotate": lambda image, strength: image.rotate(30 * strength, Image.Resampling.BILINEAR, fillcolor=GRAY),
}


def operation_matrix(name: str, strength: float, width: int, height: int) -> Matrix:
    """Return the matrix [3, 3] with which one of `OPERATIONS` moves the points of an image, in pixels."""
    # The angle's sign is that of Pillow's `rotate`.
    angle, shear = math.radians(-30 * strength), 0.3 * strength
    turn = np.array([[math.cos(angle), math.sin(angle), 0], [-math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
    # Pillow's matrices map a point of the result to the point of the image that is shown there.
    inverse = {
        "shear_x": np.array([[1, shear, 0], [0, 1, 0], [0, 0, 1]]),
        "shear_y": np.array([[1, 0, 0], [shear, 1, 0], [0, 0, 1]]),
        "translate_x": _shift(0.45 * strength * width, 0),
        "translate_y": _shift(0, 0.45 * strength * height),
        "rotate": _shift(width / 2, height / 2) @ turn @ _shift(-width / 2, -height / 2),
    }.get(name)
    return np.eye(3) if inverse is None else np.linalg.inv(inverse)


def rand_augment(image: Image.Image, rng: np.random.Generator) -> tuple[Image.Image, Matrix]:
    """Apply RandAugment to an RGB image of the same size; also return how its points moved, [3, 3].

    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", without the
    operations that change colors, which would make captions that name a color wrong. Draws `AUGMENT_COUNT` operations
    and applies each with probability `AUGMENT_PROBABILITY`.
    """
    names, matrix = list(OPERATIONS), np.eye(3)
    for _ in range(AUGMENT_COUNT):
        # Name, sign and chance are drawn for every operation, applied or not: the number of draws is constant.
        name = names[int(rng.integers(len(names)))]
        strength = AUGMENT_STRENGTH * (1 if rng.random() < 0.5 else -1)
        if rng.random() < AUGMENT_PROBABILITY:
            # Matrices act on column vectors: the later operation is on the left.
            matrix = operation_matrix(name, strength, image.width, image.height) @ matrix
            image = OPERATIONS[name](image, strength)
    return image, matrix
