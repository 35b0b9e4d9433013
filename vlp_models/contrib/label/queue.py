"""Which photo comes next.

Active order: the next photo is the one farthest, in image features, from all that are labeled or on someone's screen
(greedy k-center, the first one being the most typical); of the `AHEAD` farthest, the one with the most uncertain draft.
Greedy k-center: O. Sener, S. Savarese, "Active Learning for Convolutional Neural Networks: A Core-Set Approach" (2018).

Photos of val and test are evaluation data: they come in random order, in proportion to their number, so that what a
model is scored on is not a selection of unusual photos.

Shape suffixes: N photos, F features.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from vlp_models.contrib.label.features import FloatArray

Order = Literal["active", "random", "file"]
AHEAD = 8  # farthest photos; the most uncertain of them comes next
POOL = 20_000  # training photos that the active order compares, drawn at random from more


class PhotoQueue:
    """Orders photos. It does not track which photos are on a screen: `next` gets those that may come.

    Args:
        photos: all photos of the folder, in the order of their names.
        split_of: a photo's split; val and test are evaluation data.
    """

    def __init__(self, photos: Sequence[str], split_of: Callable[[str], str], order: Order, seed: int = 0) -> None:
        self.order = order
        self._files = list(photos)
        self.split = {photo: split_of(photo) for photo in photos}
        self._random = sorted(photos, key=lambda photo: hashlib.sha256(f"{seed} {photo}".encode()).digest())
        self._held_out_share = sum(split != "train" for split in self.split.values()) / max(1, len(photos))
        self._pool: list[str] = []
        self._rows: dict[str, int] = {}
        self._features_NF: FloatArray | None = None
        self._distances_N: FloatArray | None = None
        self._is_empty = True  # nothing is covered yet

    @property
    def is_active(self) -> bool:
        """Return whether photos come in the active order, for which all features must be known."""
        return self._distances_N is not None

    def use_features(self, features: Mapping[str, FloatArray], covered: Iterable[str]) -> None:
        """Change to the active order. covered: photos that are labeled or on a screen."""
        if self.order != "active":
            return
        self._pool = [photo for photo in self._files if photo in features and self.split[photo] == "train"]
        if len(self._pool) > POOL:
            self._pool = sorted(random.Random(0).sample(self._pool, POOL))
        if not self._pool:
            return
        self._features_NF = np.stack([features[photo] for photo in self._pool])
        self._rows = {photo: row for row, photo in enumerate(self._pool)}
        # Before any photo is covered, the most typical one is first: the nearest to the mean.
        self._distances_N = self._features_NF @ self._features_NF.mean(0)
        self._is_empty = True
        for photo in covered:
            self.cover(photo, features.get(photo))

    def cover(self, photo: str, vector_F: FloatArray | None = None) -> None:
        """Let photos similar to this one come later."""
        if self._distances_N is None or self._features_NF is None:
            return
        if vector_F is None and photo in self._rows:
            vector_F = self._features_NF[self._rows[photo]]
        if vector_F is not None:
            # (N, F) @ (F,) -> (N,): cosine distances, because the rows have unit length.
            distances_N = 1 - self._features_NF @ vector_F
            self._distances_N = distances_N if self._is_empty else np.minimum(self._distances_N, distances_N)
            self._is_empty = False

    def ahead(self, free: Collection[str], count: int = AHEAD) -> list[str]:
        """Return the training photos that are next in the active order, the farthest first."""
        if self._distances_N is None:
            return []
        photos: list[str] = []
        for row in np.argsort(-self._distances_N, kind="stable").tolist():
            if self._pool[row] in free:
                photos.append(self._pool[row])
            if len(photos) == count:
                break
        return photos

    def next(
        self, free: Collection[str], labeled: Collection[str], uncertainty: Callable[[str], float | None]
    ) -> str | None:
        """Return the photo that comes next, None without any.

        Args:
            free: photos without a caption that are on no screen.
            labeled: photos with a caption, which decide whether evaluation data is due.
            uncertainty: of a photo's draft; None: it has none yet.
        """
        if self.order == "file" or not free:
            return next((photo for photo in self._files if photo in free), None)
        if self.order == "random":
            return next(photo for photo in self._random if photo in free)
        held_out = sum(self.split.get(photo, "train") != "train" for photo in labeled)
        if held_out < self._held_out_share * len(labeled) or not self.is_active:
            # Until the features are known, photos come in the order of their names.
            names = self._random if self.is_active else self._files
            due = (photo for photo in names if photo in free and (not self.is_active or self.split[photo] != "train"))
            if photo := next(due, None):
                return photo
        ahead = self.ahead(free)
        drafted = {photo: value for photo in ahead if (value := uncertainty(photo)) is not None}
        if drafted:
            return max(ahead, key=lambda photo: drafted.get(photo, -np.inf))
        return ahead[0] if ahead else next(photo for photo in self._random if photo in free)
