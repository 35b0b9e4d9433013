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
from itertools import islice
from typing import Literal

import numpy as np

from vlp_models.contrib.label.similar import FloatArray

Order = Literal["active", "random", "file"]
AHEAD = 8  # farthest photos; the most uncertain of them comes next
POOL = 20_000  # training photos that the active order compares, drawn at random from more
FAR = 3.0  # more than any cosine distance


class PhotoQueue:
    """Orders photos. It does not track which photos are on a screen: `next` gets those that may come.

    Args:
        names: all photos of the folder, in the order of their names.
        split_of: a photo's split; val and test are evaluation data.
    """

    def __init__(self, names: Sequence[str], split_of: Callable[[str], str], order: Order, seed: int = 0) -> None:
        self.order, self.names = order, names
        self.split = {photo: split_of(photo) for photo in names}
        self._random = sorted(names, key=lambda photo: hashlib.sha256(f"{seed} {photo}".encode()).digest())
        self._held_out = {photo for photo in names if self.split[photo] != "train"}
        # of the active order, empty until the features are known
        self._rows: dict[str, int] = {}
        self._features_NF = np.zeros((0, 0), np.float32)
        self._distances_N = np.zeros(0, np.float32)

    @property
    def is_active(self) -> bool:
        """Return whether photos come in the active order, for which all features must be known."""
        return bool(self._rows)

    def use_features(self, features: Mapping[str, FloatArray], covered: Iterable[str]) -> None:
        """Change to the active order. covered: photos that are labeled or on a screen."""
        pool = [photo for photo in self.names if photo in features and photo not in self._held_out]
        if self.order != "active" or not pool:
            return
        if len(pool) > POOL:
            pool = sorted(random.Random(0).sample(pool, POOL))
        self._rows = {photo: row for row, photo in enumerate(pool)}
        self._features_NF = np.stack([features[photo] for photo in pool])
        # Until a photo is covered, all are far away, and the most typical one is first: the nearest to the mean.
        self._distances_N = FAR + self._features_NF @ self._features_NF.mean(0)
        for photo in covered:
            self.cover(photo, features.get(photo))

    def cover(self, photo: str, vector_F: FloatArray | None = None) -> None:
        """Let photos similar to this one come later."""
        if vector_F is None and photo in self._rows:
            vector_F = self._features_NF[self._rows[photo]]
        if vector_F is not None and self.is_active:
            # (N, F) @ (F,) -> (N,): cosine distances, because the rows have unit length.
            self._distances_N = np.minimum(self._distances_N, 1 - self._features_NF @ vector_F)

    def ahead(self, free: Collection[str], count: int = AHEAD) -> list[str]:
        """Return the training photos that are next in the active order, the farthest first."""
        photos = list(self._rows)
        farthest = (photos[row] for row in np.argsort(-self._distances_N, kind="stable").tolist())
        return list(islice((photo for photo in farthest if photo in free), count))

    def next(
        self, free: Collection[str], labeled: Collection[str], uncertainty: Callable[[str], float | None]
    ) -> str | None:
        """Return the photo that comes next, None without any.

        Args:
            free: photos without a caption that are on no screen.
            labeled: photos with a caption, which decide whether evaluation data is due.
            uncertainty: of a photo's draft; None: it has none yet.
        """
        if not self.is_active:
            # Until the features are known, photos come in the order of their names.
            names = self._random if self.order == "random" else self.names
            return next((photo for photo in names if photo in free), None)
        by_chance = [photo for photo in self._random if photo in free]
        held_out = [photo for photo in by_chance if photo in self._held_out]
        is_due = len(self._held_out.intersection(labeled)) * len(self.names) < len(self._held_out) * len(labeled)
        if held_out and is_due:
            return held_out[0]
        ahead = self.ahead(free)
        values = {photo: uncertainty(photo) for photo in ahead}
        drafted = {photo: value for photo, value in values.items() if value is not None}
        if drafted:
            return max(drafted, key=drafted.__getitem__)
        return next(iter(ahead or by_chance), None)
