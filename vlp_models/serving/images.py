"""Images from outside: paths, base64 text, bytes or arrays in; checked RGB images out."""

from __future__ import annotations

import base64
import binascii
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.data.images import ImageError, decode_error, open_checked, to_upright_rgb
from vlp_models.errors import DataError

MAX_PIXELS = 50_000_000
MAX_BYTES = 64 * 1024 * 1024
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
TOO_SMALL = "image_side"  # the rule's name, as `validate` counts it


def open_images(value: Any, count: int, *, requested: bool = False) -> list[Image.Image]:
    """The images of one request: of one image `open_image`'s value, of several a list of as many.

    Raises:
        DataError: another number of them, or one that `open_image` refuses.
    """
    if count == 1:
        return [open_image(value, requested=requested)]
    together = isinstance(value, (list, tuple)) or (
        isinstance(value, np.ndarray) and (value.ndim == 4 or value.dtype.kind in "OU")
    )
    if not together or len(value) != count:
        found = f"{len(value)}" if together else type(value).__name__
        raise DataError(f"the task looks at {count} images at a time: a list of {count} is expected; found {found}")
    return [open_image(one, requested=requested) for one in value]


def open_image(value: Any, *, requested: bool = False) -> Image.Image:
    """Opens one image and converts it to RGB, as people see it (EXIF rotation applied).

    Args:
        value: a path, base64 text (a `data:` URI or bare), encoded bytes, or a uint8 array [H, W, 3] or [H, W].
            With VLP_IMAGE_ROOT set, paths must lie below it.
        requested: the value comes from a request to a server. Then a path is opened only if VLP_IMAGE_ROOT is set, is
            taken from there, and what can't be had is answered in the same words whether it exists or not.

    Raises:
        DataError: not readable, not an image, an animation, smaller than `LEAST_SIDE`, or more pixels than `MAX_PIXELS`
            (read from the header, before decoding).
    """
    if isinstance(value, Image.Image):
        return _opened(to_upright_rgb(value), "the image")
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and not isinstance(value[0], str)):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise DataError("an image array is [H, W, 3] or [H, W]; found lists of different lengths") from None
        return _from_array(array)
    if isinstance(value, (bytes, bytearray)):
        return _decode(bytes(value), "image bytes")
    if isinstance(value, (str, Path)):
        return _from_request(str(value)) if requested else _from_text(str(value))
    raise DataError(f"an image is a path, base64 text, bytes or an array; found {type(value).__name__}")


def _from_text(text: str) -> Image.Image:
    if text.startswith("data:"):
        return _decode(_unbase64(text.partition(",")[2]), "data URI")
    if len(text) < 1024 and os.path.isfile(text):  # noqa: PTH113 - Path raises for a name too long
        return _from_path(Path(text))
    if len(text) > 64 and BASE64.fullmatch(text):
        return _decode(_unbase64(text), "base64 text")
    raise DataError(f"{text[:200]}: no such file, and no base64 image either")


def _from_request(text: str) -> Image.Image:
    if text.startswith("data:"):
        return _decode(_unbase64(text.partition(",")[2]), "data URI")
    root = os.environ.get("VLP_IMAGE_ROOT")
    if root and len(text) < 1024 and "\0" not in text:
        with suppress(DataError, OSError):
            return _from_path(Path(root).resolve() / text)
    if len(text) > 64 and BASE64.fullmatch(text):
        return _decode(_unbase64(text), "base64 text")
    raise DataError("no image in base64" + (", and none that this server may read by that name" if root else ""))


def _from_path(path: Path) -> Image.Image:
    root = os.environ.get("VLP_IMAGE_ROOT")
    if root and not path.resolve().is_relative_to(Path(root).resolve()):
        raise DataError(f"{path}: outside VLP_IMAGE_ROOT, which this server reads images from")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: larger than {MAX_BYTES >> 20} MB")
    return _decode(path.read_bytes(), str(path))


def _unbase64(text: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3:
        raise DataError(f"base64 image larger than {MAX_BYTES >> 20} MB")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DataError("the image is no valid base64 text") from None


def checked(content: bytes, suffix: str = "") -> Image.Image:
    """The picture in a file from outside, RGB, as people see it: the one rule, for requests and for the page.

    Args:
        suffix: the file name's ending; empty: any.

    Raises:
        ImageError: no image of a known format, an animation, damaged, smaller than `LEAST_SIDE`, or more pixels than
            `MAX_PIXELS` (read from the header, before decoding).
    """
    with open_checked(content, suffix, MAX_PIXELS, limit="the limit is") as image:
        _large_enough(image)
        try:
            return to_upright_rgb(image)
        except Exception as error:  # Pillow's plugins raise anything on hostile files
            raise decode_error(error) from None


def _decode(data: bytes, name: str) -> Image.Image:
    try:
        return checked(data)
    except ImageError as error:
        why = str(error) if error.rule == TOO_SMALL else f"not a readable image ({error})"
        raise DataError(f"{name}: {why}") from None


def _opened(image: Image.Image, name: str) -> Image.Image:
    try:
        return _large_enough(image)
    except ImageError as error:
        raise DataError(f"{name}: {error}") from None


def _large_enough(image: Image.Image) -> Image.Image:
    if min(image.size) < LEAST_SIDE:
        said = f"{image.width}x{image.height} pixels; a picture has at least {LEAST_SIDE} a side"
        raise ImageError(TOO_SMALL, said)
    return image


def _from_array(array: np.ndarray) -> Image.Image:
    if not array.size:
        raise DataError(f"an image array has pixels; found {array.shape}")
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
            raise DataError(f"an image array holds integers 0..255; found {array.dtype}")
        array = array.astype(np.uint8)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or array.size > MAX_PIXELS * 3:
        raise DataError(
            f"an image array is [H, W, 3] or [H, W] with at most {MAX_PIXELS:,} pixels; found {array.shape}"
        )
    return _opened(Image.fromarray(np.ascontiguousarray(array)), "an image array")
