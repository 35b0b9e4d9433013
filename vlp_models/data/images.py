"""What an image file is, found out before anything trusts it.

The header alone gives the format and the size; only an image within the pixel limit is decoded, whole, so that a
truncated file is found here and not in an epoch's middle. Pillow's own limits stay on.

Everybody sees a picture by `to_upright_rgb`: turned as its EXIF data says, RGB of 8 bits. Sizes and boxes are of that picture.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".bmp": "BMP",
}
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # of either byte order; + is BigTIFF
ISO_MEDIA = {  # bytes 4 to 12 of the file; HEIC's brands by ISO/IEC 23008-12
    **{b"ftyp" + brand: "a HEIC" for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")},
    **{b"ftyp" + brand: "an AVIF" for brand in (b"avif", b"avis")},
}
MAX_BYTES = 256 * 2**20
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """The file is no image we may use. `rule` is the name it is counted under."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(rule, reason)
        self.rule = rule
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def open_checked(
    content: bytes, suffix: str, max_pixels: int, limit: str = "validate.max_image_pixels is"
) -> Image.Image:
    """Opens an image and judges its header; nothing is decoded yet.

    Args:
        suffix: the file name's ending.
        limit: how an error calls `max_pixels`.

    Raises:
        ImageError: under image_not_empty, image_readable, image_format, image_not_a_bomb or image_still.
    """
    if not content:
        raise ImageError("image_not_empty", "an empty file")
    try:
        image = Image.open(io.BytesIO(content), formats=sorted(set(FORMATS.values())))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("image_not_a_bomb", f"{error} (Pillow's limit)") from None
    except Exception as error:  # Pillow's plugins raise anything on hostile headers
        raise ImageError("image_readable", _unread(content, error)) from None
    found, expected = get_format(image), FORMATS.get(suffix.lower())
    if expected and expected != found:
        raise ImageError("image_format", f"named {suffix}, but holds {found}")
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            "image_not_a_bomb",
            f"{width}x{height} is {width * height:,} pixels; {limit} {max_pixels:,}",
        )
    if found != "JPEG" and _is_animated(image):
        raise ImageError("image_still", "an animation; save the one picture of it that is meant as a file of its own")
    return image


def _unread(content: bytes, error: Exception) -> str:
    """Why Pillow reads nothing there. What cameras and scanners write is called by its name."""
    known = "a TIFF" if content.startswith(TIFF) else ISO_MEDIA.get(content[4:12], "")
    if not known:
        return f"not an image: begins with {content[:8]!r} ({_name(error)})"
    *most, last = dict.fromkeys(FORMATS.values())
    return f"{known}, which is not read; save it as one of {', '.join(most)} or {last}"


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """The picture as people see it, RGB of 8 bits, the first one of several; a copy, which no EXIF data turns again.

    Pillow cuts 16 bits of grey off at 255, which leaves white; here they are scaled.
    """
    image = apply_exif_orientation(image)
    if image.mode.startswith("I"):  # 16 bits of grey, or 32 that hold 16
        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    seen = image.convert("RGB")
    seen.info = {}
    return seen


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """The picture the way up that its EXIF data says; it still carries these data."""
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data say nothing; the picture is there all the same
        return None


def _is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception as error:  # Pillow looks for a second frame
        raise decode_error(error) from None


def get_format(image: Image.Image) -> str:
    """Pillow's name of the format; a JPEG with a second picture behind the first (MPO) is a JPEG."""
    return "JPEG" if image.format == "MPO" else str(image.format)


def decode_error(error: Exception) -> ImageError:
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


def read_file_inside(folder: Path, relative: str) -> bytes:
    """The bytes of a regular file below `folder`; no link on the way is followed.

    Raises:
        ImageError: under path_inside (absolute, `..`, or through a link), image_present, image_not_a_bomb.
    """
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if relative.startswith("/") or ".." in parts or "\0" in relative or not parts:
        raise ImageError("path_inside", f"{relative!r} leaves its folder; image paths are relative to the listing")
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            kind = os.O_NONBLOCK if last else os.O_DIRECTORY  # opening a pipe would wait
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("image_present", f"{relative}: a directory or a device")
        if status.st_size > MAX_BYTES:
            raise ImageError("image_not_a_bomb", f"{relative}: more than {MAX_BYTES >> 20} MiB on disk")
        with os.fdopen(descriptor, "rb") as file:
            descriptor = -1
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ImageError("path_inside", f"{relative}: through a symbolic link, or a file as a folder") from None
        if error.errno == errno.ENOENT:
            raise ImageError("image_present", f"{relative}: no such file") from None
        raise ImageError("image_present", f"{relative}: can't be read: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


MAX_IMAGE_PIXELS = 50_000_000
