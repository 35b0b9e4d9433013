"""The photos of a dataset of pairs: below its listing's folder, opened safely, compared with those withdrawn."""

from __future__ import annotations

import io
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from vlp_models.common.io import stat_file
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.listing import LabelError, image_key
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
        self._withdrawn: Any = None
        self._withdrawn_state: tuple[int, ...] = ()
        self._checked: dict[str, tuple[int, ...]] = {}  # photos that are not withdrawn, with the states of the files
        self._lock = threading.Lock()
        # A cache per instance: as a decorator of the method it would keep every instance in memory.
        self._encoded = lru_cache(CACHED_PHOTOS)(self._encode)

    def find(self) -> list[str]:
        """Return all photos in the order of their names; hidden files and folders are left out."""
        names: list[str] = []
        visited: set[str] = set()
        for folder, folders, files in os.walk(self.folder, followlinks=True):
            # A link may lead to a folder above itself.
            real = os.path.realpath(folder)
            folders[:] = [] if real in visited else [name for name in folders if not name.startswith(".")]
            visited.add(real)
            for file in files:
                if not file.startswith(".") and Path(file).suffix.lower() in FORMATS:
                    name = Path(folder, file).relative_to(self.folder).as_posix()
                    if is_utf8(name):
                        names.append(image_key(name))
        return sorted(names)

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
        return self._encoded(photo, self._state(self.folder / photo))

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
        with self._lock:
            state = self._state(self._withdrawn_file)
            if state != self._withdrawn_state:
                near = NearRules.of(self._rules.near_duplicates)
                self._withdrawn = read_withdrawn(self._withdrawn_file, near)
                self._withdrawn_state, self._checked = state, {}
            if not self._withdrawn:
                return
            file = self.folder / photo
            if self._checked.get(photo) == (present := self._state(file)):
                return
            try:
                keypoints = self._rules.near_duplicates.keypoints
                hashes = hash_image_file(file, self._rules.max_image_pixels, keypoints=keypoints)
            except ImageError as error:
                raise DataError(f"{photo}: {error}") from None
            reason = self._withdrawn.match(hashes)
            if not reason and self._withdrawn.has_id(join_id(self._name, photo)):
                reason = "the same name"
            if reason:
                raise LabelError(f"{photo} was withdrawn by `vlp forget` ({reason}); it gets no caption.")
            self._checked[photo] = present

    @staticmethod
    def _state(file: Path) -> tuple[int, ...]:
        try:
            return stat_file(file.stat())
        except OSError:
            return ()
