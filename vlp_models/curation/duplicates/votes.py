"""Which pictures share keypoints with one, without comparing all with all.

Locality-sensitive hashing of binary descriptions by sampled bits (Gionis et al., 1999): each of `TABLES` tables knows a
description by `BITS` of its bits. Two descriptions of one corner agree in most bits, so they meet in some table; what
meets is then compared whole.
"""

from __future__ import annotations

import numpy as np

from vlp_models.curation.duplicates.keypoints import BYTES

TABLES = 10
BITS = 22
CROWD = 48  # descriptions under one key, above which it says nothing: sky, grass, a pattern of the renderer's
NEAR = 64  # bits of 256, within which two descriptions are of one corner
BLOCK = 1 << 20  # pairs looked at together
ROWS = 1 << 13  # descriptions whose bits are spread out together


class Votes:
    """Args:
    descriptors_KB: uint8 [K, 32], the held side's, picture by picture.
    owners_K: the picture of each, as a number from 0.
    """

    def __init__(self, descriptors_KB: np.ndarray, owners_K: np.ndarray) -> None:
        bits = np.random.default_rng(1).permuted(np.tile(np.arange(8 * BYTES), (TABLES, 1)), axis=1)[:, :BITS]
        self._weights = np.zeros((8 * BYTES, TABLES), np.float32)  # sums are below 2 ** 24, so exact
        np.put_along_axis(self._weights, bits.T, np.float32(2) ** np.arange(BITS, dtype=np.float32)[:, None], axis=0)
        self._words = _words(descriptors_KB)
        self._owners = np.asarray(owners_K, np.int64)
        self._orders, self._keys = [], []
        for keys in self._table_keys(descriptors_KB):
            order = np.argsort(keys, kind="stable").astype(np.int32)
            self._orders.append(order)
            self._keys.append(keys[order])

    def _table_keys(self, descriptors_KB: np.ndarray) -> np.ndarray:
        """int32 [TABLES, K]."""
        keys = np.empty((TABLES, len(descriptors_KB)), np.int32)
        for first in range(0, len(descriptors_KB), ROWS):
            bits = np.unpackbits(descriptors_KB[first : first + ROWS], axis=1)
            keys[:, first : first + ROWS] = (bits.astype(np.float32) @ self._weights).T
        return keys

    def count(self, descriptors_KB: np.ndarray, owners_K: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each pair of pictures that share any: the asking one's number, the held one's, and how many of the asking
        one's keypoints the held one has."""
        words, owners = _words(descriptors_KB), np.asarray(owners_K, np.int64)
        found: list[np.ndarray] = []
        pictures = int(self._owners.max(initial=-1)) + 1
        for unsorted, held_keys, order in zip(self._table_keys(descriptors_KB), self._keys, self._orders, strict=True):
            asking = np.argsort(unsorted)  # in order, so that neighbours in memory are met one after another
            keys = unsorted[asking]
            low = np.searchsorted(held_keys, keys, "left")
            counts = np.searchsorted(held_keys, keys, "right") - low
            counts[counts > CROWD] = 0
            ends = np.cumsum(counts)
            first = 0
            while first < len(keys):
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
                rows = np.repeat(np.arange(first, last), counts[first:last])
                start = np.repeat(ends[first:last] - counts[first:last] - before, counts[first:last])
                held = order[low[rows] + np.arange(len(rows)) - start]
                rows = asking[rows]
                apart = words.take(rows, axis=0) ^ self._words.take(held, axis=0)  # `take`: some times as fast as []
                near = np.bitwise_count(apart).sum(axis=1, dtype=np.uint16) <= NEAR
                # a keypoint votes once for a picture, in however many tables they meet
                found.append(_distinct(rows[near] * pictures + self._owners[held[near]]))
                first = last
        if not found:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        once = _distinct(np.concatenate(found))
        pairs, votes = np.unique(owners[once // pictures] * pictures + once % pictures, return_counts=True)
        return pairs // pictures, pairs % pictures, votes


def _words(descriptors_KB: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(descriptors_KB).view(np.uint64)


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """In order, each once. `np.unique` puts whole numbers into a hash table, which takes some 70 times as long."""
    numbers = np.sort(numbers)
    return numbers[np.diff(numbers, prepend=-1) != 0]
