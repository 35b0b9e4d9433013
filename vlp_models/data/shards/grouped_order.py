"""An order of samples that puts texts about one image beside each other, so that a model looks at the image once.

Each epoch the texts of an image are cut, in a random order, into runs of at most `texts_per_image`; the runs are
permuted. Batches are cut from what results, so a run may end in the next one, and two runs of one image may meet. The
texts of an image share its draw: what chance does to the picture, it does for all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.loader import EpochOrder


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOrder(EpochOrder):
    """images: int64 [length], the number of each sample's image: that of the first sample that shows it."""

    images: NDArray[np.int64]
    texts_per_image: int

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length)
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(self.length)
        by_image = mixed[np.argsort(self.images[mixed], kind="stable")]
        images = self.images[by_image]
        places = np.arange(self.length) - np.searchsorted(images, images)  # among the texts of its image
        runs = np.cumsum(places % self.texts_per_image == 0) - 1
        return by_image[np.argsort(rng.permutation(self.length)[runs], kind="stable")]

    def draw(self, epoch: int, index: int) -> int:
        return super().draw(epoch, int(self.images[index]))


def first_of_each(names: Sequence[str]) -> NDArray[np.int64]:
    """int64 [N]: where each name stands first."""
    first: dict[str, int] = {}
    return np.fromiter((first.setdefault(name, place) for place, name in enumerate(names)), np.int64, len(names))
