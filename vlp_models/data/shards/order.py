"""The order of training samples: fully shuffled, grouped by image, or that of contrib/streaming.

- `EpochOrder`: a permutation of all samples per epoch, and each rank's share of the batches.
- `GroupedOrder`: texts about one image are adjacent, so that a model encodes the image once. In each epoch the texts of
  an image are cut, in random order, into runs of at most `texts_per_image`, and the runs are permuted. Batches are cut
  from the result, so a run may continue in the next batch, and two runs of one image may be adjacent. The texts of an
  image share its seed, and so its augmentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards import streaming
from vlp_models.errors import DataError
from vlp_models.params import StreamParams


class _Samples(Protocol):
    """The part of a dataset that its order needs."""

    @property
    def layout(self) -> Any: ...
    def first_positions(self) -> NDArray[np.uint32]: ...


def choose_order(samples: _Samples, stream: StreamParams | None, texts_per_image: int = 1) -> Callable[..., EpochOrder]:
    """Return a function that makes the order of training samples; streamed samples come in blocks.

    Args:
        texts_per_image: maximum number of adjacent texts about one image; 1: no grouping, the only value for a stream.
    """
    if texts_per_image > 1:
        return partial(GroupedOrder, images=samples.first_positions(), texts_per_image=texts_per_image)
    if samples.layout is not None and stream is not None:
        return partial(streaming("order"), layout=samples.layout, window=stream.window)
    return EpochOrder


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """One rank's share of the batches, epoch by epoch.

    batch_size: of all ranks together. Each batch is cut into `world_size` runs of rows, in the order of ranks, whose
    lengths differ by at most one. So every rank takes the same number of steps, and every sample is used exactly once
    per epoch for any number of ranks. If the last batch has fewer samples than ranks, some ranks get none.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"batch_size {self.batch_size}, rank {self.rank} of {self.world_size}")

    @property
    def steps(self) -> int:
        """Return the number of batches per epoch, the same on every rank."""
        return self.length // self.batch_size if self.drop_last else math.ceil(self.length / self.batch_size)

    def permutation(self, epoch: int) -> NDArray[np.integer]:
        """Return uint32 [length]: the order that all ranks share."""
        order = sample_numbers(self.length)
        if self.shuffle:
            # The seed of the run and the epoch, nothing else: every process draws the same order.
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        return order

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the indices of this rank's share of each batch, starting with batch `start`."""
        order = self.permutation(epoch)
        for step in range(start, self.steps):
            yield self.share(order[step * self.batch_size : (step + 1) * self.batch_size]).tolist()

    def share(self, batch: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return this rank's run of a batch."""
        # lengths of the ranks' runs differ by at most one
        first, last = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return batch[first:last]

    def sample_seed(self, epoch: int, index: int) -> int:
        """Return the 64-bit seed of a sample's random choices in an epoch."""
        return int(np.random.SeedSequence([self.seed, epoch, index]).generate_state(1, np.uint64)[0])


def sample_numbers(length: int) -> NDArray[np.uint32]:
    """Return 0, 1, ...: uint32, which is half of int64's memory, [length].

    Raises:
        DataError: there are too many.
    """
    if length > np.iinfo(np.uint32).max:
        raise DataError(f"{length:,} samples in an epoch, at most {np.iinfo(np.uint32).max:,}; choose fewer `sources`")
    return np.arange(length, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOrder(EpochOrder):
    """Adjacent texts per image.

    images: uint32 [length], the image of each sample: the number of the first sample that shows it.

    Making an epoch's order takes 20 bytes more per sample.
    """

    images: NDArray[np.uint32]
    texts_per_image: int

    def permutation(self, epoch: int) -> NDArray[np.integer]:
        if not self.shuffle:
            return sample_numbers(self.length)
        rng = np.random.default_rng([self.seed, epoch])
        # samples image by image, the texts of an image in random order
        mixed = sample_numbers(self.length)
        rng.shuffle(mixed)
        by_image = mixed[np.argsort(self.images[mixed], kind="stable")]
        images = self.images[by_image]
        # the first sample of each image, in the order by image; then each one's position among the texts of its image
        begins = np.flatnonzero(np.diff(images, prepend=images[:1] + 1)).astype(np.uint32)
        positions = sample_numbers(self.length)
        positions -= np.repeat(begins, np.diff(begins, append=np.uint32(self.length)))
        # the number of each sample's run: every `texts_per_image` texts another one begins
        runs = np.cumsum(positions % self.texts_per_image == 0, dtype=np.uint32) - np.uint32(1)
        # permute the runs: sort by a random rank per run (there are at most as many runs as samples)
        mixed = sample_numbers(self.length)
        rng.shuffle(mixed)
        return by_image[np.argsort(mixed[runs], kind="stable")]

    def sample_seed(self, epoch: int, index: int) -> int:
        return super().sample_seed(epoch, int(self.images[index]))
