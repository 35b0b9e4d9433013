"""What an image file is, found out before anything trusts it.

The header alone gives the format and the size; only an image within the pixel limit is decoded, whole, so that a
truncated file is found here and not in an epoch's middle. Pillow's own limits stay on.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".bmp": "BMP",
}
MAX_BYTES = 256 * 2**20


class ImageError(ValueError):
    """The file is no image we may use. `rule` is the name it is counted under."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(rule, reason)
        self.rule = rule
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def open_checked(content: bytes, suffix: str, max_pixels: int) -> Image.Image:
    """Opens an image and judges its header; nothing is decoded yet. `suffix`: the file name's ending.

    Raises:
        ImageError: under image_not_empty, image_readable, image_format or image_not_a_bomb.
    """
    if not content:
        raise ImageError("image_not_empty", "an empty file")
    try:
        image = Image.open(io.BytesIO(content), formats=sorted(set(FORMATS.values())))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("image_not_a_bomb", f"{error} (Pillow's limit)") from None
    except Exception as error:  # Pillow's plugins raise anything on hostile headers
        raise ImageError("image_readable", f"not an image: begins with {content[:8]!r} ({_name(error)})") from None
    found, expected = format_of(image), FORMATS.get(suffix.lower())
    if expected and expected != found:
        raise ImageError("image_format", f"named {suffix}, but holds {found}")
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            "image_not_a_bomb",
            f"{width}x{height} is {width * height:,} pixels; validate.max_image_pixels is {max_pixels:,}",
        )
    return image


def format_of(image: Image.Image) -> str:
    """Pillow's name of the format; a JPEG with a second picture behind the first (MPO) is a JPEG."""
    return "JPEG" if image.format == "MPO" else str(image.format)


def undecodable(error: Exception) -> ImageError:
    return ImageError("image_decodes", f"damaged or cut short: {_name(error)}: {error}")


def read_file(path: Path) -> bytes:
    """
    Raises:
        ImageError: under image_present or image_not_a_bomb.
    """
    try:
        if not path.is_file():
            raise ImageError("image_present", "a directory or a device" if path.exists() else "no such file")
        if path.stat().st_size > MAX_BYTES:
            raise ImageError("image_not_a_bomb", f"more than {MAX_BYTES >> 20} MiB on disk")
        return path.read_bytes()
    except OSError as error:
        raise ImageError("image_present", f"can't be read: {error.strerror}") from None


def _name(error: Exception) -> str:
    return type(error).__name__
