"""Which pictures share keypoints with one, without comparing all with all.

Locality-sensitive hashing of binary descriptions by sampled bits (Gionis et al., 1999): each of `TABLES` tables knows a
description by `BITS` of its bits. Two descriptions of one corner agree in most bits, so they meet in some table; what
meets is then compared whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TABLES = 10
BITS = 22
CROWD = 48  # descriptions under one key, above which it says nothing: sky, grass, a pattern of the renderer's
NEAR = 64  # bits of 256, within which two descriptions are of one corner
BLOCK = 1 << 20  # pairs looked at together


class Votes:
    """Args:
    descriptors_KB: uint8 [K, 32], the held side's, picture by picture.
    owners_K: the picture of each, as a number from 0.
    """

    def __init__(self, descriptors_KB: np.ndarray, owners_K: np.ndarray) -> None:
        self._bits = np.random.default_rng(1).permuted(np.tile(np.arange(256), (TABLES, 1)), axis=1)[:, :BITS]
        self._words = _words(descriptors_KB)
        self._owners = np.asarray(owners_K, np.int64)
        self._orders, self._keys = [], []
        for keys in self._table_keys(descriptors_KB):
            order = np.argsort(keys, kind="stable").astype(np.int32)
            self._orders.append(order)
            self._keys.append(keys[order])

    def _table_keys(self, descriptors_KB: np.ndarray) -> Sequence[np.ndarray]:
        bits = np.unpackbits(descriptors_KB, axis=1)
        weights = (1 << np.arange(BITS)).astype(np.float32)  # exact below 2 ** 24, and float products are fast
        return [(bits[:, chosen].astype(np.float32) @ weights).astype(np.int32) for chosen in self._bits]

    def count(self, descriptors_KB: np.ndarray, owners_K: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each pair of pictures that share any: the asking one's number, the held one's, and how many of the asking
        one's keypoints the held one has."""
        words, owners = _words(descriptors_KB), np.asarray(owners_K, np.int64)
        found: list[np.ndarray] = []
        pictures = int(self._owners.max(initial=-1)) + 1
        for keys, held_keys, order in zip(self._table_keys(descriptors_KB), self._keys, self._orders, strict=True):
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
                near = np.bitwise_count(words[rows] ^ self._words[held]).sum(axis=1) <= NEAR
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
