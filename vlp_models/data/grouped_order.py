"""An order of samples that puts texts about one image beside each other, so that a model looks at the image once.

Each epoch the texts of an image are cut, in a random order, into runs of at most `together`; the runs are permuted.
Batches are cut from what results, so a run may end in the next one. The texts of an image share its draw: what chance
does to the picture, it does for all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.block_order import BlockOrder
from vlp_models.data.blocks import Layout
from vlp_models.data.loader import EpochOrder
from vlp_models.errors import ParamsError
from vlp_models.params import StreamParams


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOrder(EpochOrder):
    """images: int64 [length], the number of each sample's image: that of the first sample that shows it."""

    images: NDArray[np.int64]
    together: int

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length)
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(self.length)
        by_image = mixed[np.argsort(self.images[mixed], kind="stable")]
        images = self.images[by_image]
        places = np.arange(self.length) - np.searchsorted(images, images)  # among the texts of its image
        runs = np.cumsum(places % self.together == 0) - 1
        return by_image[np.argsort(rng.permutation(self.length)[runs], kind="stable")]

    def draw(self, epoch: int, index: int) -> int:
        return super().draw(epoch, int(self.images[index]))


class _Samples(Protocol):
    """A dataset, as far as its order needs it."""

    @property
    def layout(self) -> Layout | None: ...
    def image_ids(self) -> Sequence[str]: ...


def order_of(samples: _Samples, stream: StreamParams | None, together: int = 1) -> Callable[..., EpochOrder]:
    """The order of a training's samples: in blocks where they are streamed.

    Args:
        together: texts about one image that stand beside each other; 1: none are put there.

    Raises:
        ParamsError: both are asked for.
    """
    layout = samples.layout
    if together > 1:
        if layout is not None:
            raise ParamsError(
                "params.yaml: `texts_per_image` puts texts about one image beside each other, `trainer.stream` mixes "
                "them within blocks: set `texts_per_image: 1`, or leave `trainer.stream.address` empty"
            )
        return partial(GroupedOrder, images=first_of_each(samples.image_ids()), together=together)
    if layout is not None and stream is not None:
        return partial(BlockOrder, layout=layout, window=stream.window)
    return EpochOrder


def first_of_each(names: Sequence[str]) -> NDArray[np.int64]:
    """int64 [N]: where each name stands first."""
    first: dict[str, int] = {}
    return np.fromiter((first.setdefault(name, place) for place, name in enumerate(names)), np.int64, len(names))
