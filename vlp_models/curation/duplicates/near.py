"""Pairs of 64-bit hashes within a Hamming distance, without comparing all with all.

Multi-index hashing (Norouzi et al., 2012): cut a hash into `radius + 1` bands; two hashes that differ in at most
`radius` bits agree in one band at least. One side is held, its bands sorted; the other streams past in blocks, so
memory depends on the held side and the block alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

MAX_RADIUS = 8  # nine bands of seven bits: beyond, a band tells too little apart
BLOCK = 1 << 18  # candidate pairs looked at together


class NearHashes:
    """Args:
    hashes: uint64 [N], the held side.
    radius: the largest distance that counts.
    """

    def __init__(self, hashes: np.ndarray, radius: int) -> None:
        if not 0 <= radius <= MAX_RADIUS:
            raise ValueError(f"radius must be 0 to {MAX_RADIUS}: {radius}")
        self._hashes = np.asarray(hashes, np.uint64)
        self._radius = radius
        edges = np.linspace(0, 64, radius + 2).astype(int)
        self._bands = [(int(low), int(high - low)) for low, high in pairwise(edges)]
        self._orders = [np.argsort(self._key(self._hashes, band), kind="stable") for band in self._bands]
        self._sorted = [
            self._key(self._hashes, band)[order] for band, order in zip(self._bands, self._orders, strict=True)
        ]

    @staticmethod
    def _key(hashes: np.ndarray, band: tuple[int, int]) -> np.ndarray:
        start, width = band
        mask = np.uint64((1 << width) - 1)
        return (hashes >> np.uint64(start)) & mask

    def pairs(self, queries: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Arrays of equal length: positions in `queries` and in the held side. A pair comes once."""
        queries = np.asarray(queries, np.uint64)
        for number, (band, order, keys) in enumerate(zip(self._bands, self._orders, self._sorted, strict=True)):
            wanted = self._key(queries, band)
            low = np.searchsorted(keys, wanted, "left")
            counts = np.searchsorted(keys, wanted, "right") - low
            ends = np.cumsum(counts)
            first = 0
            while first < len(queries):
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
                rows = np.repeat(np.arange(first, last), counts[first:last])
                within = np.arange(len(rows)) - np.repeat(
                    ends[first:last] - counts[first:last] - before, counts[first:last]
                )
                held = order[low[rows] + within]
                first = last
                bits = queries[rows] ^ self._hashes[held]
                close = np.bitwise_count(bits) <= self._radius
                rows, held, bits = rows[close], held[close], bits[close]
                for earlier in self._bands[:number]:  # a pair that agrees there has come
                    fresh = self._key(bits, earlier) != 0
                    rows, held, bits = rows[fresh], held[fresh], bits[fresh]
                if len(rows):
                    yield rows, held
