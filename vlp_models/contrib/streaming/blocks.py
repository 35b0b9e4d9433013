"""Blocks of shards: runs of adjacent images, a few megabytes, that one request fetches; webdataset unpacks them.

Which images are adjacent, and where each block begins and ends, follows from the index alone.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.contrib.streaming.store import Store
from vlp_models.data.shards.write import shard_name
from vlp_models.errors import DataError
from vlp_models.params import StreamParams

PARALLEL_REQUESTS = 8  # per process
Spans = Callable[[], Iterator[NDArray[np.int64]]]


def open_shards(directory: Path, split: str, stream: StreamParams, layout: Layout | None) -> BlockReader:
    """Open the tars of a split at `stream.address`.

    Args:
        directory: the shards whose index is read; both must be of one packing.
        layout: None: each image is requested separately.

    Raises:
        DataError: the shards there are different, or cannot be read.
    """
    store = Store(stream.address, stream.timeout_seconds, stream.retry_seconds)
    if store.read("manifest.json") != (directory / "manifest.json").read_bytes():
        raise DataError(
            f"{store.url('manifest.json')}: differs from {directory}: upload these shards, "
            "or run `dvc pull data/shards` at the commit that made the uploaded ones"
        )
    return BlockReader(store, split, layout, stream.buffer_mb << 20)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the samples of a dataset are. For the K blocks with samples, in the order of the shards:

    keys          int64 [K]: shard, and which of its blocks
    begins, ends  int64 [K]: byte range of its images in the tar
    counts        int64 [K]: number of samples
    order         int64 [N]: the samples, block after block; None: they are in this order already
    """

    block_bytes: int
    keys: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    order: NDArray[np.int64] | None

    @classmethod
    def of(cls, spans: Spans, block_bytes: int) -> Layout:
        """Make the layout.

        Args:
            spans: yields int64 [n, 3], N rows in total: per sample the shard, and where in its tar the members of its
                image begin (the first header) and end.
        """
        # grouped piece by piece, then all groups again: memory does not grow with the samples
        groups: list[NDArray[np.int64]] = []  # each int64 [4, K]
        in_order, last = True, -1
        for piece in spans():
            keys = _block_keys(piece, block_bytes)
            in_order = in_order and bool((np.diff(keys, prepend=last) >= 0).all())
            last = int(keys[-1]) if len(keys) else last
            groups.append(_group_by_key(keys, piece[:, 1], piece[:, 2], np.ones_like(keys)))
        keys, begins, ends, counts = _group_by_key(*np.concatenate(groups, axis=1))
        order = None
        if not in_order:
            order = np.argsort(np.concatenate([_block_keys(piece, block_bytes) for piece in spans()]), kind="stable")
        return cls(block_bytes=block_bytes, keys=keys, begins=begins, ends=ends, counts=counts, order=order)

    def key(self, shard: int, begin: int) -> int:
        """Return the key of the block with this byte of a shard."""
        # The shard in the upper 32 bits, the block within it in the lower ones: keys sort by shard, then by position.
        return shard << 32 | begin // self.block_bytes

    def span(self, key: int) -> tuple[int, int, int] | None:
        """Return shard, begin and end of a block; None if the dataset has no sample in it."""
        # keys are sorted
        block = int(np.searchsorted(self.keys, key))
        if block == len(self.keys) or self.keys[block] != key:
            return None
        return key >> 32, int(self.begins[block]), int(self.ends[block])


def _block_keys(spans: NDArray[np.int64], block_bytes: int) -> NDArray[np.int64]:
    """Return int64 [n]: the `Layout.key` of the block in which each span begins."""
    return spans[:, 0] << 32 | spans[:, 1] // block_bytes


def _group_by_key(
    keys: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return int64 [4, K]: each key once, its smallest begin, largest end and sum of counts."""
    unique, inverse = np.unique(keys, return_inverse=True)
    # Start values that any begin and any end replace.
    smallest, largest = np.full(len(unique), np.iinfo(np.int64).max), np.zeros_like(unique)
    total = np.zeros_like(unique)
    np.minimum.at(smallest, inverse, begins)
    np.maximum.at(largest, inverse, ends)
    np.add.at(total, inverse, counts)
    return np.stack([unique, smallest, largest, total])


@dataclass
class BlockReader:
    """Reads members of one split's shards by the block. Keeps up to `buffer_bytes` of the most recently used blocks."""

    store: Store
    split: str
    layout: Layout | None  # None: each image is requested separately
    buffer_bytes: int
    requests: int = 0
    _held: OrderedDict[int, dict[str, bytes]] = field(default_factory=OrderedDict, repr=False)
    _size: int = field(default=0, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)
    _process: int = field(default=0, repr=False)

    def fetch(self, spans: Iterable[tuple[int, int, int]]) -> dict[str, bytes]:
        """Return the members of these images and of adjacent ones, by name; several blocks are requested in parallel.

        Args:
            spans: per image the shard, and where in its tar its members begin and end.

        Raises:
            DataError: a shard is missing, access is denied, it is truncated or not a tar, or the store does not
                respond.
        """
        if self._process != os.getpid():  # threads and buffered blocks do not survive a fork
            self._held, self._size, self._process = OrderedDict(), 0, os.getpid()
            self._pool = ThreadPoolExecutor(PARALLEL_REQUESTS)
        members: dict[str, bytes] = {}
        buffered: set[int] = set()  # keys of the blocks that are added to `members` already
        missing: dict[int, tuple[int, int, int]] = {}  # key of a block, or a negative number -> byte range to request
        for shard, begin, end in spans:
            key = self.layout.key(shard, begin) if self.layout is not None else -1
            block_span = self.layout.span(key) if self.layout is not None else None
            if block_span is None:  # requested separately, e.g. the second image of a pair
                missing[-1 - len(missing)] = (shard, begin, end)
            elif key in self._held and key not in buffered:
                self._held.move_to_end(key)
                buffered.add(key)
                members |= self._held[key]
            elif key not in buffered:
                missing[key] = block_span
        assert self._pool is not None
        self.requests += len(missing)
        # Blocks of one batch are requested in parallel, each once.
        for key, block in zip(missing, self._pool.map(self._read, missing.values()), strict=True):
            members |= block
            if key >= 0:  # a whole block: its other images are likely requested next
                self._held[key] = block
                self._size += sum(map(len, block.values()))
        # drop the least recently used blocks
        while self._size > self.buffer_bytes and len(self._held) > 1:
            _, block = self._held.popitem(last=False)
            self._size -= sum(map(len, block.values()))
        return members

    def _read(self, span: tuple[int, int, int]) -> dict[str, bytes]:
        from webdataset.tariterators import tar_file_iterator

        shard, begin, end = span
        name = shard_name(self.split, shard)
        data = self.store.read(name, begin, end)
        try:
            # texts are in the index
            members = tar_file_iterator(io.BytesIO(data), select_files=lambda name: not name.endswith(".json"))
            return {member["fname"]: member["data"] for member in members}
        except Exception as error:  # tarfile raises anything on bad contents
            raise DataError(
                f"{self.store.url(name)}: bytes {begin:,} to {end:,} are not part of a tar: {error}; "
                "upload this shard again"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        # Threads, connections and buffers stay in this process: a worker makes its own.
        return {**self.__dict__, "_held": OrderedDict(), "_size": 0, "_pool": None, "_process": 0}
