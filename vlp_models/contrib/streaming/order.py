"""A random order of samples that still reads blocks of shards one after the other.

A permutation of all samples would request a block per sample. Here the blocks are permuted, the sequence is cut into
lanes, and samples are shuffled within a window of each lane. A batch takes its rows from several lanes, and the next
batch from others: each process and each worker reads its own lanes, every block about once per epoch. The batches are a
function of (seed, epoch), independent of the number of processes and workers, and are computed one at a time: memory
does not grow with the samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vlp_models.contrib.streaming.blocks import Layout
from vlp_models.data.shards.order import EpochOrder

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
