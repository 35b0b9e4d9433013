"""Open images from untrusted sources: a path, base64 text, bytes or an array in; a checked RGB image out."""

from __future__ import annotations

import base64
import binascii
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.data.images import ImageError, check_header, decode_error, open_checked, to_upright_rgb
from vlp_models.errors import DataError

MAX_PIXELS = 50_000_000
MAX_REQUEST_PIXELS = 2 * MAX_PIXELS  # of all images of a request to a server
MAX_BYTES = 64 * 1024 * 1024
BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]+(?:=\s*){0,2}")  # either alphabet, lines of any length
# `data:image/png;base64,`: everything up to the first comma.
DATA_URI = re.compile(r"\s*data:[^,]*,", re.IGNORECASE)
URL_SAFE = str.maketrans("-_", "+/")
LIMIT = "the limit is"  # before the number of pixels
TOO_SMALL = "image_side"  # the rule's name, as `validate` counts it


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedImage:
    """An image that is within the limits, and not decoded yet.

    content  an image file; or the image, if it came as an array or as an image of Pillow
    pixels   how many it has
    name     of the image in messages
    damaged  the message for a damaged file, in place of the reason; empty: the reason
    """

    content: bytes | Image.Image
    pixels: int
    name: str
    damaged: str = ""

    def open(self) -> Image.Image:
        """Return the image as upright RGB.

        Raises:
            DataError: it is damaged.
        """
        if isinstance(self.content, Image.Image):
            return self.content
        try:
            return decode_checked(self.content)
        except ImageError as error:
            raise (DataError(self.damaged) if self.damaged else _explain(error, self.name)) from None


def check_images(value: Any, count: int, *, untrusted: bool = False) -> list[CheckedImage]:
    """Check the images of one request: a single value for one image, a list of `count` values for several.

    Raises:
        DataError: the number is wrong, or `check_image` rejects one.
    """
    if count == 1:
        return [check_image(value, untrusted=untrusted)]
    # An array is a list of images if it holds their pixels, [count, H, W, 3], or objects, paths or texts.
    is_array_of_images = isinstance(value, np.ndarray) and (value.ndim == 4 or value.dtype.kind in "OSU")
    is_list = isinstance(value, (list, tuple)) or is_array_of_images
    if not is_list or len(value) != count:
        actual = f"{len(value)}" if is_list else type(value).__name__
        raise DataError(f"the task takes {count} images per request, as a list; found {actual}")
    return [check_image(image, untrusted=untrusted) for image in value]


def open_image(value: Any) -> Image.Image:
    """Return the image that `check_image` checks as upright RGB (EXIF rotation applied).

    Raises:
        DataError: `check_image` rejects it, or it is damaged.
    """
    return check_image(value).open()


def check_image(value: Any, *, untrusted: bool = False) -> CheckedImage:
    """Check one image; the pixels of a file are counted in its header, and not decoded.

    Args:
        value: an image of Pillow, a path, base64 text (a `data:` URI or bare; standard or URL-safe alphabet, with or
            without padding and line breaks), the bytes of an image file or of base64 text, or a uint8 array [H, W, 3]
            or [H, W]; also an array as nested lists.
            With VLP_IMAGE_ROOT set, paths must be inside it.
        untrusted: the value comes from a request to a server. A path is then opened only if VLP_IMAGE_ROOT is set,
            relative to it, and a failure has the same message whether the file exists or not.

    Raises:
        DataError: not readable, not an image, an animation, smaller than `LEAST_SIDE` or of more than `MAX_PIXELS`.
    """
    if isinstance(value, Image.Image):
        return _from_picture(value)
    # A list of numbers at some depth; a list of texts is several images, which one image cannot be.
    if isinstance(value, list) and value and not isinstance(value[0], str):
        _check_list(value)
        try:
            # After the check: NumPy allocates what the nested lists imply.
            value = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise DataError("an image array must be [H, W, 3] or [H, W]; found lists of different lengths") from None
    if isinstance(value, np.ndarray):
        return _from_array(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(value))
    if isinstance(value, (str, Path)):
        return _from_request(str(value)) if untrusted else _from_text(str(value))
    if untrusted:
        raise DataError(
            f"must be the base64 text of an image file, or its pixels as a list; found {type(value).__name__}"
        )
    raise DataError(f"an image must be a path, base64 text, bytes or an array; found {type(value).__name__}")


def _from_bytes(data: bytes) -> CheckedImage:
    try:
        # An image file comes first: base64 text is never a valid one.
        return _check_file(data, "image bytes")
    except DataError:  # not an image file: perhaps its base64 text
        image = _from_base64(data.decode("ascii", errors="replace"))
        if image is None:
            raise
        return image


def _from_text(text: str) -> CheckedImage:
    if len(text) < 1024 and os.path.isfile(text):  # noqa: PTH113 - Path raises for a name too long
        return _from_path(Path(text))
    image = _from_base64(text)
    if image is None:
        raise DataError(f"{text[:200]}: neither a file nor a base64 image")
    return image


def _from_request(text: str) -> CheckedImage:
    # One message for every failure, so that a client cannot learn which files exist.
    root = os.environ.get("VLP_IMAGE_ROOT")
    paths = ", nor a file that this server may read" if root else "; this server opens no paths"
    refusal = f"not the base64 text of an image file{paths}"
    # A zero byte would raise in the system call, with another message than the others.
    if root and len(text) < 1024 and "\0" not in text:
        with suppress(DataError, OSError, UnicodeEncodeError):
            # An absolute path replaces the root in `/`; `_from_path` refuses what is outside of it.
            return replace(_from_path(Path(root).resolve() / text), damaged=refusal)
    image = _from_base64(text)
    if image is None:
        raise DataError(refusal)
    return image


def _from_base64(text: str) -> CheckedImage | None:
    """Check the image in base64 as clients write it: in a URI, in lines, URL-safe, percent-encoded, without padding.

    None if the text is of another kind.
    """
    uri = DATA_URI.match(text)
    if uri:
        text = text[uri.end() :]
    # A short text, or one with other characters, is a path or a mistake.
    elif len(text) <= 64 or not BASE64.fullmatch(text):
        return None
    # A URI may be percent-encoded, an e-mail has lines, and a URL `-_` for `+/` and no padding.
    if "%" in text:
        text = unquote(text)
    text = "".join(text.split())
    # Four characters encode three bytes.
    if len(text) > MAX_BYTES * 4 // 3:
        raise DataError(f"base64 image larger than {MAX_BYTES >> 20} MB")
    text = text.translate(URL_SAFE)
    if not text.endswith("="):
        # Base64 has groups of four characters, so missing padding can be computed.
        text += "=" * (-len(text) % 4)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DataError("the image is not valid base64") from None
    return _check_file(content, "data URI" if uri else "base64 text")


def _from_path(path: Path) -> CheckedImage:
    root = os.environ.get("VLP_IMAGE_ROOT")
    # Resolved, so that `..` and symbolic links do not lead out of the folder.
    if root and not path.resolve().is_relative_to(Path(root).resolve()):
        raise DataError(f"{path}: outside VLP_IMAGE_ROOT, the only folder this server reads images from")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: larger than {MAX_BYTES >> 20} MB")
    return _check_file(path.read_bytes(), str(path))


def decode_checked(content: bytes) -> Image.Image:
    """Decode an untrusted image file as upright RGB; requests and the demo page share these limits.

    Raises:
        ImageError: not an image of a known format, an animation, damaged, smaller than `LEAST_SIDE`, or with more
            pixels than `MAX_PIXELS` (read from the header, before decoding).
    """
    with open_checked(content, MAX_PIXELS, limit=LIMIT) as image:
        return _decode_opened(image)


def _decode_opened(image: Image.Image) -> Image.Image:
    _check_size(image)
    try:
        return to_upright_rgb(image)
    except Exception as error:  # Pillow's plugins raise anything on hostile files
        raise decode_error(error) from None


def _check_size(image: Image.Image) -> None:
    if min(image.size) < LEAST_SIDE:
        text = f"{image.width}x{image.height} pixels; an image needs at least {LEAST_SIDE} per side"
        raise ImageError(TOO_SMALL, text)


def _check_file(content: bytes, name: str) -> CheckedImage:
    try:
        with open_checked(content, MAX_PIXELS, limit=LIMIT) as image:
            _check_size(image)
            return CheckedImage(content=content, pixels=image.width * image.height, name=name)
    except ImageError as error:
        raise _explain(error, name) from None


def _from_picture(image: Image.Image, name: str = "the image") -> CheckedImage:
    """Check an image that Pillow has opened, and may not have decoded."""
    try:
        check_header(image, MAX_PIXELS, limit=LIMIT)
        return CheckedImage(content=_decode_opened(image), pixels=image.width * image.height, name=name)
    except ImageError as error:
        raise _explain(error, name) from None


def _explain(error: ImageError, name: str) -> DataError:
    return DataError(f"{name}: {error}" if error.rule == TOO_SMALL else f"{name}: not a readable image ({error})")


def _check_list(value: list[Any]) -> None:
    """Refuse nested lists that hold anything but integers, are nested too deeply or too large.

    NumPy would give every element the width of the longest text, so a short request would take gigabytes.
    """
    level: list[Any] = value
    for _ in range(3):  # rows, pixels, channels
        # One level of nesting per round: rows, then pixels of a gray image or pixels' channels, then channels.
        kinds = set(map(type, level))
        # True is an integer in Python, but not a color.
        if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            return
        if kinds == {np.ndarray} and all(np.issubdtype(array.dtype, np.integer) for array in level):
            return
        if not all(issubclass(kind, (list, tuple)) for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(f"an image array must hold integers 0 to 255; found a list of {names}")
        # The number of values of the next level, before a list of that length is made.
        if sum(map(len, level)) > MAX_PIXELS * 3:
            raise DataError(f"an image array must have at most {MAX_PIXELS:,} pixels; found more")
        level = list(chain.from_iterable(level))
    raise DataError("an image array must be [H, W, 3] or [H, W]; found lists that are nested more deeply")


def _from_array(array: np.ndarray) -> CheckedImage:
    if not array.size:
        raise DataError(f"an image array must not be empty; found {array.shape}")
    if array.dtype != np.uint8:
        # Other integer types are accepted if their values fit; floats would be ambiguous (0 to 1, or 0 to 255).
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > 255:
            raise DataError(f"an image array must hold integers 0 to 255; found {array.dtype}")
        array = array.astype(np.uint8)
    if array.ndim == 2:  # gray: [H, W] -> [H, W, 3]
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or array.size > MAX_PIXELS * 3:
        raise DataError(
            f"an image array must be [H, W, 3] or [H, W] with at most {MAX_PIXELS:,} pixels; found {array.shape}"
        )
    # Pillow reads rows without gaps, which a slice of an array does not have.
    return _from_picture(Image.fromarray(np.ascontiguousarray(array)), "an image array")
