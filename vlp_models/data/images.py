"""Image files from untrusted sources: checks on the header, safe reading, and the upright RGB image.

The header alone gives format and size; only an image within the pixel limit is decoded, and then fully, so that a
truncated file is found here and not in the middle of an epoch. Pillow's own limits stay on.

All code uses the image of `to_upright_rgb`: rotated according to its EXIF data, 8-bit RGB. Sizes and boxes refer to it.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from vlp_models.common.io import HEAD, explain_stand_in
from vlp_models.data.names import Names
from vlp_models.errors import first_line

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".bmp": "BMP",
}
# How files of other formats begin. ISO media have their size first, then `ftyp` and a brand.
OTHER_FORMATS = {
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "a TIFF"),  # in both byte orders; + is BigTIFF
    **dict.fromkeys((b"\xff\x0a", b"\0\0\0\x0cJXL "), "a JPEG XL"),
    **dict.fromkeys((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), "a JPEG 2000"),
    **dict.fromkeys((b"<svg", b"<?xml"), "an SVG or another XML file"),
    b"8BPS": "a Photoshop file",
    b"%PDF": "a PDF",
    b"\0\0\1\0": "an icon (.ico)",
}
_HEIC = ("heic", "heix", "heim", "heis", "hevc", "hevx", "mif1", "mif2", "msf1")  # of ISO/IEC 23008-12
ISO_MEDIA = dict.fromkeys(_HEIC, "a HEIC") | dict.fromkeys(("avif", "avis"), "an AVIF")
# Pillow refuses a PNG for one text or color profile of a megabyte, which other programs show; all together may have 64.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
MAX_BYTES = 256 * 2**20
SCAN = b"\xff\xda"  # begins a scan of a JPEG; each may go over all pixels again
MAX_SCANS = 500  # a camera's JPEG has about ten
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
    """The file is not a usable image. `rule` is the name it is counted under."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(rule, reason)
        self.rule = rule
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def open_checked(content: bytes, max_pixels: int, limit: str = "validate.max_image_pixels is") -> Image.Image:
    """Open an image and check its header; nothing is decoded yet. The content decides the format, not the file's name.

    Args:
        limit: how the error names `max_pixels`.

    Raises:
        ImageError: under image_not_empty, image_readable, image_not_a_bomb or image_still.
    """
    if not content:
        raise ImageError("image_not_empty", "an empty file")
    try:
        image = Image.open(io.BytesIO(content), formats=sorted(set(FORMATS.values())))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("image_not_a_bomb", f"{error} (Pillow's limit)") from None
    except Exception as error:  # Pillow's plugins raise anything on hostile headers
        raise ImageError("image_readable", _explain_unreadable(content, error)) from None
    # each scan costs a pass over all pixels
    if get_format(image) == "JPEG" and (scans := content.count(SCAN)) > MAX_SCANS:
        raise ImageError("image_not_a_bomb", f"a JPEG with {scans:,} scans, {MAX_SCANS} are allowed; save it again")
    check_header(image, max_pixels, limit)
    return image


def check_header(image: Image.Image, max_pixels: int, limit: str) -> None:
    """Check an opened image before it is decoded; `max_pixels` and `limit` as in `open_checked`.

    Raises:
        ImageError: under image_not_a_bomb, image_decodes or image_still.
    """
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            "image_not_a_bomb",
            f"{width}x{height} is {width * height:,} pixels; {limit} {max_pixels:,}",
        )
    try:
        # a JPEG with a second image in it is no animation
        is_animated = get_format(image) != "JPEG" and bool(getattr(image, "is_animated", False))
    except Exception as error:  # Pillow looks for a second frame
        raise decode_error(error) from None
    if is_animated:
        raise ImageError("image_still", "an animation; save one of its frames as a file")


def _explain_unreadable(content: bytes, error: Exception) -> str:
    """Return why Pillow cannot read a file; other formats, and what is in the place of an image, are named."""
    if reason := explain_stand_in(content[:HEAD]):
        return reason
    other = next((name for start, name in OTHER_FORMATS.items() if content.startswith(start)), "")
    if content[4:8] == b"ftyp":
        other = ISO_MEDIA.get(content[8:12].decode("latin1"), "a video or a camera's raw file")
    if not other:
        # Pillow's plain "cannot identify image file" has the address of the buffer in it.
        detail = "" if isinstance(error, UnidentifiedImageError) else f"; {first_line(error)}"
        return f"not an image, or cut short: begins with {content[:8]!r} ({type(error).__name__}{detail})"
    *formats, last = dict.fromkeys(FORMATS.values())
    return f"{other}, which is not supported; save it as one of {', '.join(formats)} or {last}"


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """Return the image as displayed, 8-bit RGB, the first of several frames; a copy without EXIF data.

    Pillow truncates 16-bit gray at 255, which leaves white; here it is scaled.
    """
    image = apply_exif_orientation(image)
    if image.mode.startswith("I"):  # 16-bit gray, or 32-bit with 16 in use
        # 65535 / 257 = 255, rounded to the nearest
        gray = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(((gray + 128) // 257).astype(np.uint8))
    rgb = image.convert("RGB")
    # EXIF would rotate the image a second time
    rgb.info = {}
    return rgb


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return the image rotated according to its EXIF data, which it keeps."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # ignore damaged EXIF data: the image is still readable
        turn = None
    return image if turn is None else image.transpose(turn)


def get_format(image: Image.Image) -> str:
    """Return Pillow's name of the format; a JPEG with a second image in it (MPO) is a JPEG."""
    return "JPEG" if image.format == "MPO" else str(image.format)


def is_misnamed(path: Path, actual: str) -> bool:
    """Return whether a file's suffix is that of another image format than the one found in it."""
    return FORMATS.get(path.suffix.lower(), actual) != actual


def decode_error(error: Exception) -> ImageError:
    """Return the error for an image that Pillow cannot decode."""
    return ImageError("image_decodes", f"damaged or cut short: {type(error).__name__}: {error}")


def read_file(path: Path) -> bytes:
    """Return the contents of a file.

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
        raise ImageError("image_present", f"cannot be read: {error.strerror}") from None


def read_file_inside(folder: Path, relative: str) -> bytes:
    """Return the contents of a regular file below `folder`, without following links.

    If there is no file of exactly this name, but one that differs only in Unicode form, letter case or the direction of
    slashes, it is that one.

    Raises:
        ImageError: under path_inside (absolute, `..`, or through a link), image_present, image_not_a_bomb.
    """
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    # a path from Windows, unless a file's name has a backslash
    if "\\" in relative and not os.path.lexists(folder / relative):
        return read_file_inside(folder, relative.replace("\\", "/"))
    if relative.startswith("/") or ".." in parts or "\0" in relative or not parts:
        raise ImageError("path_inside", f"{relative!r} leaves its folder; image paths are relative to the listing")
    descriptor = -1
    try:
        # open folder by folder, each relative to the one above: a link swapped in meanwhile is not followed
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            kind = os.O_NONBLOCK if last else os.O_DIRECTORY  # opening a pipe would block
            below = _open_inside(descriptor, part, os.O_RDONLY | os.O_NOFOLLOW | kind)
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
        # O_NOFOLLOW fails with ELOOP, O_DIRECTORY with ENOTDIR
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ImageError(
                "path_inside", f"{relative}: through a symbolic link, or a file used as a folder"
            ) from None
        if error.errno == errno.ENOENT:
            raise ImageError("image_present", f"{relative}: no such file") from None
        raise ImageError("image_present", f"{relative}: cannot be read: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


MAX_IMAGE_PIXELS = 50_000_000


_names: dict[tuple[int, int, int], Names] = {}  # device, inode and time of a folder -> its names


def _open_inside(folder: int, name: str, flags: int) -> int:
    """Open a file or folder in an open folder, or the only one there whose name is equal if folded."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        status = os.fstat(folder)
        # a changed folder is listed again
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if key not in _names:
            if len(_names) >= 8:
                _names.clear()
            _names[key] = Names(os.listdir(folder))
        match = _names[key].match(name)
        if match is None:
            raise
        return os.open(match, flags, dir_fd=folder)
