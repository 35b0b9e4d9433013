"""An order of samples that is random and still reads blocks of shards one after the other.

A permutation of all samples would ask for a block a sample. Here the blocks are permuted, the sequence is cut into
lanes, and samples are mixed within a window of each lane. A batch takes its rows from several lanes, and the next one
from others: each process and each worker reads lanes of its own, every block about once an epoch.

The batches are a function of (seed, epoch), of the number of processes or workers in nothing, and are worked out one
at a time: memory does not grow with the samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.blocks import Layout
from vlp_models.data.shards.loader import EpochOrder

LANES = 8  # of one batch: as many processes read nothing twice
TURNS = 4  # batches that share no lane: as many workers read nothing twice


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockOrder(EpochOrder):
    """`EpochOrder` over a `Layout`. window: how many blocks' samples a lane mixes."""

    layout: Layout
    window: int
    _first: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_first", np.cumsum(self.layout.counts) - self.layout.counts)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """int64 [length]: the batches behind each other; for looking at small ones."""
        found = [_Epoch(self, epoch).batch(step) for step in range(self.steps)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        order = _Epoch(self, epoch)
        for step in range(start, self.steps):
            yield self.share(order.batch(step)).tolist()

    def rows_of_lanes(self, size: int) -> NDArray[np.int64]:
        """int64 [LANES]: the rows of each in a batch of `size`."""
        return np.diff(np.arange(LANES + 1) * size // LANES)

    def samples(self, blocks: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these places of these blocks."""
        numbers = self._first[blocks] + places
        return numbers if self.layout.order is None else self.layout.order[numbers]


class _Epoch:
    """The batches of one epoch."""

    def __init__(self, order: BlockOrder, epoch: int) -> None:
        self._order = order
        self._seed = [order.seed, epoch]
        count = len(order.layout.counts)
        self._blocks = np.random.default_rng(self._seed).permutation(count) if order.shuffle else np.arange(count)
        self._ends = np.cumsum(order.layout.counts[self._blocks])
        self._window = max(1, order.window * -(-order.length // max(1, count)))
        full, rest = divmod(order.length, order.batch_size)
        self._sizes = (order.batch_size, 0 if order.drop_last else rest)
        rows, last = (order.rows_of_lanes(size) for size in self._sizes)
        turns = [len(range(turn, full, TURNS)) for turn in range(TURNS)]
        lengths = np.stack([rows * of_turn + last * (full % TURNS == turn) for turn, of_turn in enumerate(turns)])
        self._lengths = lengths.reshape(-1)  # int64 [TURNS * LANES]
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._full = full
        self._mixed: dict[int, tuple[int, NDArray[np.int64]]] = {}  # lane -> its window under way

    def batch(self, step: int) -> NDArray[np.int64]:
        """int64 [size]: the samples of batch `step`, lane after lane."""
        order = self._order
        if not order.shuffle:
            first = step * order.batch_size
            return self._at(np.arange(first, min(first + order.batch_size, order.length)))
        rows = order.rows_of_lanes(self._sizes[0])
        these = rows if step < self._full else order.rows_of_lanes(self._sizes[1])
        turn, before = step % TURNS, step // TURNS * rows
        taken = [self._take(turn * LANES + lane, before[lane], before[lane] + these[lane]) for lane in range(LANES)]
        return self._at(np.concatenate(taken))

    def _take(self, lane: int, first: int, last: int) -> NDArray[np.int64]:
        """The places, in the sequence of blocks, of a lane's samples `first` to `last`."""
        shift = self._window * lane // (LANES * TURNS)  # or all lanes would change blocks at once
        found = []
        while first < last:
            number = (first + shift) // self._window
            begin, mixed = self._mix(lane, number, shift)
            end = min(last, begin + len(mixed))
            found.append(mixed[first - begin : end - begin])
            first = end
        return self._starts[lane] + (np.concatenate(found) if found else np.zeros(0, np.int64))

    def _mix(self, lane: int, number: int, shift: int) -> tuple[int, NDArray[np.int64]]:
        """Where window `number` of a lane begins, and its samples in a random order."""
        begin = max(0, number * self._window - shift)
        if self._mixed.get(lane, (-1, None))[0] != number:
            end = min(int(self._lengths[lane]), (number + 1) * self._window - shift)
            rng = np.random.default_rng([*self._seed, lane, number])
            self._mixed[lane] = number, begin + rng.permutation(end - begin)
        return begin, self._mixed[lane][1]

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these places of the sequence of blocks."""
        blocks = np.searchsorted(self._ends, places, side="right")
        chosen = self._blocks[blocks]
        return self._order.samples(chosen, places - self._ends[blocks] + self._order.layout.counts[chosen])
