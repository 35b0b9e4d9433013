"""The order of training samples: fully shuffled, grouped by image, or in blocks for streaming.

- `EpochOrder`: a permutation of all samples per epoch, and each rank's share of the batches.
- `GroupedOrder`: texts about one image are adjacent, so that a model encodes the image once. In each epoch the texts of
  an image are cut, in random order, into runs of at most `texts_per_image`, and the runs are permuted. Batches are cut
  from the result, so a run may continue in the next batch, and two runs of one image may be adjacent. The texts of an
  image share its seed, and so its augmentation.
- `BlockOrder`: random, and still reads blocks of shards one after the other. A permutation of all samples would request
  a block per sample. Here the blocks are permuted, the sequence is cut into lanes, and samples are shuffled within a
  window of each lane. A batch takes its rows from several lanes, and the next batch from others: each process and each
  worker reads its own lanes, every block about once per epoch. The batches are a function of (seed, epoch), independent
  of the number of processes and workers, and are computed one at a time: memory does not grow with the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.stream import Layout
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import StreamParams


class _Samples(Protocol):
    """The part of a dataset that its order needs."""

    @property
    def layout(self) -> Layout | None: ...
    def first_positions(self) -> NDArray[np.uint32]: ...


def choose_order(samples: _Samples, stream: StreamParams | None, texts_per_image: int = 1) -> Callable[..., EpochOrder]:
    """Return a function that makes the order of training samples; streamed samples come in blocks.

    Args:
        texts_per_image: maximum number of adjacent texts about one image; 1: no grouping.

    Raises:
        ParamsError: both grouping and streaming are requested.
    """
    layout = samples.layout
    if texts_per_image > 1:
        if layout is not None:
            raise ParamsError(
                "params.yaml: `texts_per_image` makes texts about one image adjacent, `trainer.stream` shuffles "
                "them within blocks: set `texts_per_image: 1`, or leave `trainer.stream.address` empty"
            )
        return partial(GroupedOrder, images=samples.first_positions(), texts_per_image=texts_per_image)
    if layout is not None and stream is not None:
        return partial(BlockOrder, layout=layout, window=stream.window)
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


LANES = 8  # of one batch: up to as many processes read no block twice
TURNS = 4  # consecutive batches without a common lane: up to as many workers read no block twice


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockOrder(EpochOrder):
    """`EpochOrder` over a `Layout`. window: number of blocks whose samples a lane shuffles."""

    layout: Layout
    window: int
    _first: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_first", np.cumsum(self.layout.counts) - self.layout.counts)

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        order = _Epoch(self, epoch)
        for step in range(start, self.steps):
            yield self.share(order.batch(step)).tolist()

    def rows_of_lanes(self, size: int) -> NDArray[np.int64]:
        """Return int64 [LANES]: the rows of each lane in a batch of `size`."""
        # Edges of nearly equal parts; their differences are the sizes.
        return np.diff(np.arange(LANES + 1) * size // LANES)

    def samples(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions of these blocks."""
        numbers = self._first[blocks] + positions
        return numbers if self.layout.order is None else self.layout.order[numbers]


class _Epoch:
    """The batches of one epoch."""

    def __init__(self, order: BlockOrder, epoch: int) -> None:
        self._order = order
        self._seed = [order.seed, epoch]
        count = len(order.layout.counts)
        self._blocks = np.random.default_rng(self._seed).permutation(count) if order.shuffle else np.arange(count)
        # Where each block ends in the permuted sequence of samples.
        self._ends = np.cumsum(order.layout.counts[self._blocks])
        self._window = max(1, order.window * -(-order.length // max(1, count)))  # in samples of an average block
        # the rows of each lane in all batches of its turn: full ones, and the last one, which may be smaller
        full, rest = divmod(order.length, order.batch_size)
        self._sizes = (order.batch_size, 0 if order.drop_last else rest)
        rows, last = (order.rows_of_lanes(size) for size in self._sizes)
        # Turn t has the batches t, t + TURNS, t + 2 * TURNS, ...
        turns = [len(range(turn, full, TURNS)) for turn in range(TURNS)]
        # (TURNS, LANES): the samples of each lane over the whole epoch.
        lengths = np.stack([rows * of_turn + last * (full % TURNS == turn) for turn, of_turn in enumerate(turns)])
        self._lengths = lengths.reshape(-1)  # int64 [TURNS * LANES]
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._full = full
        self._mixed: dict[int, tuple[int, NDArray[np.int64]]] = {}  # lane -> its current window

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return int64 [size]: the samples of batch `step`, lane after lane."""
        order = self._order
        if not order.shuffle:
            first = step * order.batch_size
            return self._at(np.arange(first, min(first + order.batch_size, order.length)))
        rows = order.rows_of_lanes(self._sizes[0])
        batch_rows = rows if step < self._full else order.rows_of_lanes(self._sizes[1])
        turn, first_L = step % TURNS, step // TURNS * rows  # first_L: rows that earlier batches took of each lane
        last_L = first_L + batch_rows
        positions = [self._take(turn * LANES + lane, first_L[lane], last_L[lane]) for lane in range(LANES)]
        return self._at(np.concatenate(positions))

    def _take(self, lane: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions, in the sequence of blocks, of samples `first` to `last` of a lane."""
        shift = self._window * lane // (LANES * TURNS)  # so that not all lanes change blocks at once
        parts = []  # one per window
        while first < last:
            # Windows are shifted by `shift`, so the first one of a lane is shorter.
            number = (first + shift) // self._window
            begin, mixed = self._mix(lane, number, shift)
            end = min(last, begin + len(mixed))
            parts.append(mixed[first - begin : end - begin])
            first = end
        return self._starts[lane] + (np.concatenate(parts) if parts else np.zeros(0, np.int64))

    def _mix(self, lane: int, number: int, shift: int) -> tuple[int, NDArray[np.int64]]:
        """Return where window `number` of a lane begins, and its samples in random order."""
        begin = max(0, number * self._window - shift)
        if self._mixed.get(lane, (-1, None))[0] != number:
            end = min(int(self._lengths[lane]), (number + 1) * self._window - shift)
            # a window's order does not depend on the ones before, so any batch can be computed
            rng = np.random.default_rng([*self._seed, lane, number])
            self._mixed[lane] = number, begin + rng.permutation(end - begin)
        return begin, self._mixed[lane][1]

    def _at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions of the sequence of blocks."""
        number = np.searchsorted(self._ends, positions, side="right")  # of the block, in the permuted sequence
        blocks = self._blocks[number]
        # Where the block begins: its end less its samples.
        starts = self._ends[number] - self._order.layout.counts[blocks]
        return self._order.samples(blocks, positions - starts)
