"""The photos of a dataset of pairs: below its listing's folder, opened safely, compared with those withdrawn."""

from __future__ import annotations

import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from vlp_models.common.io import stat_file
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.listing import LabelError
from vlp_models.curation.duplicates import read_withdrawn
from vlp_models.curation.duplicates.hashes import hash_image_file
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.data.formats.base import is_utf8, join_id
from vlp_models.data.images import FORMATS, ImageError
from vlp_models.errors import DataError
from vlp_models.params import ValidateParams
from vlp_models.serving.images import open_image

SHOWN = 1600  # pixels of a photo's longer side on the page
CACHED_PHOTOS = 32  # encoded for the page


class Photos:
    """The image files below a folder; a photo is named by its path relative to it.

    Args:
        name: the dataset's, with which ids of images start.
    """

    def __init__(self, folder: Path, name: str, workspace: Workspace, rules: ValidateParams) -> None:
        self.folder, self._name, self._rules = folder, name, rules
        self._withdrawn_file = workspace.withdrawn
        # Caches per instance: as decorators of methods they would keep every instance in memory.
        self._encoded = lru_cache(CACHED_PHOTOS)(self._encode)
        self._withdrawn = lru_cache(1)(self._read_withdrawn)

    def find(self) -> list[str]:
        """Return all photos in the order of their names; hidden files and folders are left out."""
        names: list[str] = []
        visited: set[str] = set()
        for folder, folders, files in os.walk(self.folder, followlinks=True):
            # A link may lead to a folder above itself.
            real = os.path.realpath(folder)
            folders[:] = [] if real in visited else [name for name in folders if not name.startswith(".")]
            visited.add(real)
            paths = [Path(folder, file) for file in files if not file.startswith(".")]
            names += [p.relative_to(self.folder).as_posix() for p in paths if p.suffix.lower() in FORMATS]
        return sorted(filter(is_utf8, names))

    def open(self, photo: str) -> Image.Image:
        """Return a photo as upright RGB.

        Raises:
            LabelError: it is withdrawn.
            DataError: it cannot be read, or is not an image within the limits of serving/images.py.
        """
        self.check(photo)
        try:
            return open_image(self.folder / photo)
        except OSError as error:
            raise DataError(f"{photo}: cannot be read ({error.strerror})") from None

    def jpeg(self, photo: str) -> bytes:
        """Return a photo for the page, as JPEG with a longer side of at most `SHOWN` pixels. Raises what `open` does.

        The file's own bytes are not served: they may be of another kind than their name.
        """
        self.check(photo)
        return self._encoded(photo, _state(self.folder / photo))

    def _encode(self, photo: str, state: tuple[int, ...]) -> bytes:
        image = self.open(photo)
        image.thumbnail((SHOWN, SHOWN))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=88)
        return buffer.getvalue()

    def check(self, photo: str) -> None:
        """Refuse a photo that `vlp forget` withdrew, or a copy of one.

        Raises:
            LabelError: it is withdrawn.
            DataError: it cannot be decoded, while there is a list to compare it with; or a line of the list is damaged.
        """
        withdrawn = self._withdrawn(_state(self._withdrawn_file))
        if not withdrawn:
            return
        keypoints = self._rules.near_duplicates.keypoints
        try:
            hashes = hash_image_file(self.folder / photo, self._rules.max_image_pixels, keypoints=keypoints)
        except ImageError as error:
            raise DataError(f"{photo}: {error}") from None
        has_id = withdrawn.has_id(join_id(self._name, photo))
        if reason := withdrawn.match(hashes) or ("the same name" if has_id else ""):
            raise LabelError(f"{photo} was withdrawn by `vlp forget` ({reason}); it gets no caption.")

    def _read_withdrawn(self, state: tuple[int, ...]) -> Any:
        return read_withdrawn(self._withdrawn_file, NearRules.of(self._rules.near_duplicates))


def _state(file: Path) -> tuple[int, ...]:
    return stat_file(file.stat()) if file.exists() else ()
