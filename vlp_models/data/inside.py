"""Reading a picture out of a folder that somebody else has filled, and nothing that lies outside of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from vlp_models.data.images import MAX_BYTES, ImageError


def read_inside(folder: Path, relative: str) -> bytes:
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
