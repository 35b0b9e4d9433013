"""Near-duplicate search: which indexed images each query is a copy of.

Two cheap searches propose pairs, alignment.py verifies them:

- the perceptual hash of the indexed image, in each of its 8 orientations (`HammingIndex`);
- keypoints shared with the indexed image or its mirror image (`KeypointIndex`).

The index is in memory, about 60 kB an image; queries come in batches and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vlp_models.curation.duplicates.alignment import SAME_CORNER, Agreement, align_by_keypoints, align_by_orientation
from vlp_models.curation.duplicates.fingerprints import (
    DESCRIPTOR_BYTES,
    ORIENTATIONS,
    Fingerprint,
    perceptual_hash_of_gray,
    to_gray,
)
from vlp_models.params.data import NearDuplicateParams

MAX_RADIUS = 8  # nine bands of seven bits: beyond it, a band distinguishes too little
PAIRS_BLOCK = 1 << 18  # candidate pairs compared together

TABLES = 10  # hash tables of the keypoint index
KEY_BITS = 22  # bits of a descriptor that make its key in one table
CROWD = 48  # descriptors under one key above which the key is ignored: sky, grass, a repeated pattern
VOTES_BLOCK = 1 << 20  # pairs of descriptors compared together
UNPACK_ROWS = 1 << 13  # descriptors whose bits are unpacked together

MIN_SHARED = 8  # shared keypoints below which a pair is not verified
MAX_PROPOSALS = 3  # by default

KeepPair = Callable[[int, int], bool]  # (number of the query, number of the indexed image)
_MIRRORED = ("", "mirrored")
_ROTATED = ("", "rotated by 90 degrees", "rotated by 180 degrees", "rotated by 270 degrees")


@dataclass(frozen=True, kw_only=True)
class NearRules:
    """What counts as a near-duplicate.

    max_hash_distance  of 64 perceptual bits, up to which a pair is verified; -1: hashes propose nothing
    keypoints          whether shared keypoints propose pairs
    """

    max_hash_distance: int
    keypoints: bool

    @staticmethod
    def of(params: NearDuplicateParams) -> NearRules:
        """Return the rules of `validate.near_duplicates`."""
        return NearRules(max_hash_distance=params.max_hash_distance, keypoints=params.keypoints)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A query that is a copy of an indexed image, by their numbers; `change` is the readable difference."""

    indexed: int
    query: int
    change: str
    agreement: Agreement


class NearDuplicateIndex:
    """An index of fingerprints that finds their copies among queries."""

    def __init__(self, fingerprints: Sequence[Fingerprint], rules: NearRules) -> None:
        self._fingerprints = fingerprints
        hashes, self._orientations = [], []
        for number, fingerprint in enumerate(fingerprints):
            # a rotated or mirrored copy has the hash of the indexed image in that orientation
            for orientation in range(ORIENTATIONS):
                value = perceptual_hash_of_gray(to_gray(fingerprint.oriented(orientation)))
                if value is not None:
                    hashes.append(value)
                    self._orientations.append((number, orientation))
        self._hashes: HammingIndex | None = None
        if rules.max_hash_distance >= 0 and hashes:
            self._hashes = HammingIndex(np.array(hashes, np.uint64), rules.max_hash_distance)
        # two views of each image: view 2 n is image n, view 2 n + 1 its mirror image
        views = [view for fingerprint in fingerprints for view in (fingerprint.keypoints, fingerprint.mirrored)]
        # (keypoints of all views,): the view of each keypoint.
        owners = np.repeat(np.arange(len(views)), [len(view) for view in views])
        self._keypoints: KeypointIndex | None = None
        if rules.keypoints and len(owners):
            self._keypoints = KeypointIndex(_stack(view.descriptors_KB for view in views), owners)

    def search(
        self,
        queries: Sequence[Fingerprint],
        keep: KeepPair = lambda query, indexed: True,
        proposals: int = MAX_PROPOSALS,
    ) -> list[Match]:
        """Return the indexed images that each query is a copy of, including itself if it is indexed.

        Args:
            keep: which pairs to verify.
            proposals: indexed images verified per query, those that share most keypoints.
        """
        matches: dict[tuple[int, int], Match] = {}
        # hashes first: they also give the orientation
        for query, indexed, orientation in self._propose_by_hash(queries):
            if (query, indexed) in matches or not keep(query, indexed):
                continue
            if agreement := align_by_orientation(self._fingerprints[indexed], orientation, queries[query]):
                parts = (_MIRRORED[orientation // 4], _ROTATED[orientation % 4])
                change = " and ".join(filter(None, parts)) or "hardly changed"
                matches[query, indexed] = Match(indexed=indexed, query=query, change=change, agreement=agreement)
        # then keypoints, for pairs that are not matched yet
        for query, view in self._propose_by_keypoints(queries, proposals):
            indexed, mirrored = divmod(view, 2)
            if (query, indexed) in matches or not keep(query, indexed):
                continue
            if agreement := align_by_keypoints(self._fingerprints[indexed], bool(mirrored), queries[query]):
                change = "mirrored and changed" if mirrored else "changed"
                matches[query, indexed] = Match(indexed=indexed, query=query, change=change, agreement=agreement)
        return sorted(matches.values(), key=lambda match: (match.query, match.indexed))

    def _propose_by_hash(self, queries: Sequence[Fingerprint]) -> list[tuple[int, int, int]]:
        """Return (query, indexed image, its orientation) of all pairs within the hash distance."""
        if self._hashes is None:
            return []
        hashed = [(number, query.perceptual) for number, query in enumerate(queries) if query.perceptual is not None]
        pairs = self._hashes.pairs(np.array([value for _, value in hashed], np.uint64))
        proposals = {
            (hashed[q][0], *self._orientations[i])
            for rows, columns in pairs
            for q, i in zip(rows, columns, strict=True)
        }
        return sorted(proposals)

    def _propose_by_keypoints(self, queries: Sequence[Fingerprint], proposals: int) -> list[tuple[int, int]]:
        """Return (query, view) of the views that share most keypoints, those with most first."""
        if self._keypoints is None:
            return []
        owners = np.repeat(np.arange(len(queries)), [len(query.keypoints) for query in queries])
        descriptors = _stack(query.keypoints.descriptors_KB for query in queries)
        counts = self._keypoints.count_shared(descriptors, owners)
        # P pairs of a query and a view
        queries_P, views_P, shared_P = (part[counts[2] >= MIN_SHARED] for part in counts)
        # by query, then most shared keypoints first
        order = np.lexsort((views_P, -shared_P, queries_P))
        queries_P, views_P = queries_P[order], views_P[order]
        # the first pairs of each query
        first = np.arange(len(order)) - np.searchsorted(queries_P, queries_P) < proposals
        return list(zip(queries_P[first].tolist(), views_P[first].tolist(), strict=True))


def _stack(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, DESCRIPTOR_BYTES), np.uint8), *parts])


class HammingIndex:
    """Find pairs of 64-bit hashes within a Hamming distance, without comparing all with all.

    Multi-index hashing (Norouzi et al., 2012): cut a hash into `radius + 1` bands; two hashes that differ in at most
    `radius` bits agree in at least one band. The indexed hashes are sorted by each band; queries stream past in
    blocks, so memory depends on the index and the block alone.

    Args:
        hashes: uint64 [N].
        radius: the largest distance that counts.
    """

    def __init__(self, hashes: np.ndarray, radius: int) -> None:
        if not 0 <= radius <= MAX_RADIUS:
            raise ValueError(f"radius must be 0 to {MAX_RADIUS}: {radius}")
        self._hashes = np.asarray(hashes, np.uint64)
        self._radius = radius
        # radius + 1 bands of nearly equal width
        edges = np.linspace(0, 64, radius + 2).astype(int)
        self._bands = [(int(low), int(high - low)) for low, high in pairwise(edges)]  # (first bit, width)
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
        """Yield arrays of equal length: positions in `queries` and in the index. Each pair comes once."""
        queries = np.asarray(queries, np.uint64)
        for number, (band, order, keys) in enumerate(zip(self._bands, self._orders, self._sorted, strict=True)):
            query_keys = self._key(queries, band)
            # indexed hashes with the query's key in this band are a run of the sorted keys
            # The run of a key starts at `low` and has `counts` entries.
            low = np.searchsorted(keys, query_keys, "left")
            counts = np.searchsorted(keys, query_keys, "right") - low
            for rows, positions in _candidates(low, counts, PAIRS_BLOCK):
                indexed = order[positions]
                differing = queries[rows] ^ self._hashes[indexed]
                close = np.bitwise_count(differing) <= self._radius
                rows, indexed, differing = rows[close], indexed[close], differing[close]
                for earlier in self._bands[:number]:  # a pair that agrees in an earlier band was yielded there
                    fresh = self._key(differing, earlier) != 0
                    rows, indexed, differing = rows[fresh], indexed[fresh], differing[fresh]
                if len(rows):
                    yield rows, indexed


class KeypointIndex:
    """Count the keypoints that images share, without comparing all with all.

    Locality-sensitive hashing of binary descriptors by sampled bits (Gionis et al., 1999): each of `TABLES` tables
    stores a descriptor under `KEY_BITS` of its bits. Two descriptors of one corner agree in most bits, so they meet in
    some table; candidates are then compared in full.

    Args:
        descriptors_KB: uint8 [K, 32] of the indexed images, image by image.
        owners_K: the image of each descriptor, as a number from 0.
    """

    def __init__(self, descriptors_KB: np.ndarray, owners_K: np.ndarray) -> None:
        all_bits = np.tile(np.arange(8 * DESCRIPTOR_BYTES), (TABLES, 1))
        bits = np.random.default_rng(1).permuted(all_bits, axis=1)[:, :KEY_BITS]
        # a table's key is a matrix product: bit j of the key has weight 2 ** j; sums stay below 2 ** 24, so exact
        self._weights = np.zeros((8 * DESCRIPTOR_BYTES, TABLES), np.float32)
        powers = np.float32(2) ** np.arange(KEY_BITS, dtype=np.float32)[:, None]
        np.put_along_axis(self._weights, bits.T, powers, axis=0)
        self._words = _as_words(descriptors_KB)
        self._owners = np.asarray(owners_K, np.int64)
        self._orders, self._keys = [], []
        for keys in self._table_keys(descriptors_KB):
            order = np.argsort(keys, kind="stable").astype(np.int32)
            self._orders.append(order)
            self._keys.append(keys[order])

    def _table_keys(self, descriptors_KB: np.ndarray) -> np.ndarray:
        """Return the key of each descriptor in each table, int32 [TABLES, K]."""
        keys = np.empty((TABLES, len(descriptors_KB)), np.int32)
        for first in range(0, len(descriptors_KB), UNPACK_ROWS):
            bits = np.unpackbits(descriptors_KB[first : first + UNPACK_ROWS], axis=1)
            keys[:, first : first + UNPACK_ROWS] = (bits.astype(np.float32) @ self._weights).T
        return keys

    def count_shared(
        self, descriptors_KB: np.ndarray, owners_K: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each pair of images that share keypoints: query, indexed image, number of shared keypoints."""
        words, owners = _as_words(descriptors_KB), np.asarray(owners_K, np.int64)
        meetings: list[np.ndarray] = []
        images = int(self._owners.max(initial=-1)) + 1
        for unsorted, table, order in zip(self._table_keys(descriptors_KB), self._keys, self._orders, strict=True):
            query_order = np.argsort(unsorted)  # sorted keys visit the table in memory order
            keys = unsorted[query_order]
            low = np.searchsorted(table, keys, "left")
            counts = np.searchsorted(table, keys, "right") - low
            # a crowded key distinguishes little and costs the most comparisons
            counts[counts > CROWD] = 0
            for rows, positions in _candidates(low, counts, VOTES_BLOCK):
                indexed, rows = order[positions], query_order[rows]
                # `take` is several times as fast as indexing with []
                differing = words.take(rows, axis=0) ^ self._words.take(indexed, axis=0)
                near = np.bitwise_count(differing).sum(axis=1, dtype=np.uint16) <= SAME_CORNER
                # (query keypoint, indexed image), once however many tables they meet in
                meetings.append(_sorted_distinct(rows[near] * images + self._owners[indexed[near]]))
        if not meetings:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        distinct = _sorted_distinct(np.concatenate(meetings))
        # A pair of images as one number, query * images + indexed: counting equal numbers counts shared keypoints.
        pairs, shared = np.unique(owners[distinct // images] * images + distinct % images, return_counts=True)
        return pairs // images, pairs % images, shared


def _candidates(low: np.ndarray, counts: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows and their candidates' positions in a sorted table, about `block` candidates at a time.

    Args:
        low, counts: int64 [N], each row's first candidate in the table and their number.
    """
    # rows [first, last) have about `block` candidates in total
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + block, "right")))
        rows = np.repeat(np.arange(first, last), counts[first:last])
        # number each row's candidates from 0
        start = np.repeat(ends[first:last] - counts[first:last] - before, counts[first:last])
        yield rows, low[rows] + np.arange(len(rows)) - start
        first = last


def _as_words(descriptors_KB: np.ndarray) -> np.ndarray:
    """View 32 bytes as four uint64 words [K, 4]."""
    return np.ascontiguousarray(descriptors_KB).view(np.uint64)


def _sorted_distinct(numbers: np.ndarray) -> np.ndarray:
    """Return distinct non-negative integers in order; np.unique hashes integers, which takes about 70 times as long."""
    numbers = np.sort(numbers)
    return numbers[np.diff(numbers, prepend=-1) != 0]
