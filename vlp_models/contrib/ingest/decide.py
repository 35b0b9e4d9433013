"""Decide which images of a submission are new: not repeated in it, not in the dataset, not in any evaluation split.

Two images are the same if their bytes or pixels are equal, or if their perceptual hashes differ in at most `radius`
bits and their thumbnails agree. For evaluation images, changed copies count as well
(curation/duplicates/search.py). An image in two splits is a leak, and the copy in the lower split (train < val < test)
is rejected; an image twice in one split is a duplicate, and the first one stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vlp_models.contrib.ingest.index import BATCH_ORIGIN, HashIndex, IndexedImage, unsigned
from vlp_models.contrib.ingest.reading import Staging
from vlp_models.curation.duplicates.alignment import align_by_orientation
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.curation.duplicates.leakage import INDEXED, batches, describe_match
from vlp_models.curation.duplicates.search import HammingIndex, NearDuplicateIndex, NearRules
from vlp_models.data.tables import SPLITS

Verdict = tuple[str, str, str]  # verdict, rule, reason


def decide(staging: Staging, index: HashIndex, radius: int, near: NearRules, withdrawn: Any) -> None:
    """Set the verdict of every image of the submission that is not new.

    Args:
        radius: largest distance of perceptual hashes; -1: only equal bytes or pixels.
        near: rules for changed copies of evaluation images.
        withdrawn: what `read_withdrawn` returns.
    """
    if withdrawn:
        verdicts: dict[int, Verdict] = {}
        for image, _, sha256, pixels, _ in _undecided(staging):
            if how := withdrawn.match_hashes(sha256.hex(), pixels.hex(), staging.fingerprint_of(image)):
                verdicts[image] = ("withdrawn", "image_withdrawn", f"the image ({how}) was withdrawn (`vlp forget`)")
        _write(staging, verdicts)
    _compare_to_index(staging, index, radius)
    _find_changed_copies(staging, index, near)
    _compare_within_submission(staging, radius, near)


def _compare_to_index(staging: Staging, index: HashIndex, radius: int) -> None:
    verdicts: dict[int, Verdict] = {}
    splits: dict[int, str] = {}
    numbers, hashes = [], []  # of images with a perceptual hash
    for image, split, sha256, pixels, perceptual in _undecided(staging):
        splits[image] = split
        # The second column is 1 if the bytes are equal as well, not only the pixels.
        matches = index.connection.execute(
            "SELECT id, sha256 = ?1 FROM images WHERE sha256 = ?1 OR pixels = ?2", (sha256, pixels)
        )
        for number, bytes_too in matches.fetchall():
            how = "byte for byte" if bytes_too else "pixel for pixel"
            _add_verdict(verdicts, image, split, index.image(number), how)
        if perceptual is not None:
            numbers.append(image)
            hashes.append(unsigned(perceptual))
    if radius >= 0 and hashes:
        images, image_hashes = np.array(numbers), np.array(hashes, np.uint64)
        # The submission is indexed and the dataset streams past it: the dataset may be too large for memory.
        near = HammingIndex(image_hashes, radius)
        for ids, indexed_hashes in index.perceptual_blocks():
            # positions in the block, and in `images`
            for indexed_rows, rows in near.pairs(indexed_hashes):
                distance = np.bitwise_count(indexed_hashes[indexed_rows] ^ image_hashes[rows])
                for number, image, bits in zip(ids[indexed_rows], images[rows], distance, strict=True):
                    number, image = int(number), int(image)
                    if _thumbnails_agree(index.fingerprint_of(number), staging.fingerprint_of(image)):
                        how = f"{bits} of 64 perceptual bits apart"
                        _add_verdict(verdicts, image, splits[image], index.image(number), how)
    _write(staging, verdicts)


def _thumbnails_agree(first: Fingerprint | None, second: Fingerprint | None) -> bool:
    """Verify a pair that a hash proposed; without a fingerprint the hash decides."""
    return first is None or second is None or align_by_orientation(first, 0, second) is not None


def _index_in_blocks(
    rows: Iterable[tuple[int, Fingerprint]], rules: NearRules
) -> Iterator[tuple[list[int], NearDuplicateIndex]]:
    """Index evaluation images, as many at a time as fit in memory; yield their names and the index."""
    for names, fingerprints in batches(rows, INDEXED):
        yield names, NearDuplicateIndex(fingerprints, rules)


def _find_changed_copies(staging: Staging, index: HashIndex, rules: NearRules) -> None:
    """Find changed copies of evaluation images, those of the index in the submission and the other way round."""
    verdicts: dict[int, Verdict] = {}
    splits = {image: split for image, split, *_ in _undecided(staging)}
    # copies of indexed evaluation images in the submission
    for ids, near in _index_in_blocks(index.fingerprints(held_out=True), rules):
        for images, fingerprints in batches(staging.fingerprints()):
            for match in near.search(fingerprints):
                image, number = images[match.query], ids[match.indexed]
                _add_verdict(verdicts, image, splits[image], index.image(number), describe_match(match))
    # copies of the submission's evaluation images among indexed training images
    for images, near in _index_in_blocks(staging.fingerprints(held_out=True), rules):
        for ids, fingerprints in batches(index.fingerprints(held_out=False)):
            for match in near.search(fingerprints):
                image, number = images[match.indexed], ids[match.query]
                _add_verdict(verdicts, image, splits[image], index.image(number), describe_match(match))
    _write(staging, verdicts)


def _add_verdict(verdicts: dict[int, Verdict], image: int, split: str, indexed: IndexedImage, how: str) -> None:
    """Set the verdict on an image that equals an indexed one; a leak overrides a duplicate."""
    if indexed.split != split:
        rule = "leak_into_evaluation" if indexed.split == "train" else "leak_from_evaluation"
        verdict = "leak", rule, f"the same image ({how}) is in {indexed.split} as {indexed.image_id}"
    elif split != "train" or indexed.origin.startswith(BATCH_ORIGIN):
        verdict = "duplicate", "image_known", f"the same image ({how}) is already there as {indexed.image_id}"
    else:
        return  # two training sets may share an image
    if image not in verdicts or verdicts[image][0] == "duplicate":
        verdicts[image] = verdict


def _compare_within_submission(staging: Staging, radius: int, rules: NearRules) -> None:
    # images of test before those of val before those of train: the copy in the lower split is rejected
    rows = sorted(_undecided(staging), key=lambda row: (-SPLITS.index(row[1]), row[0]))
    # sorted and distinct; positions in it stand for the hashes
    hashes = np.unique(np.array([unsigned(row[4]) for row in rows if row[4] is not None], np.uint64))
    near = _near_values(hashes, radius)
    copies: dict[int, dict[int, str]] = defaultdict(dict)  # image -> evaluation images it is a copy of -> how
    for ids, held_out in _index_in_blocks(staging.fingerprints(held_out=True), rules):
        for numbers, fingerprints in batches(staging.fingerprints()):
            for match in held_out.search(fingerprints):
                copies[numbers[match.query]][ids[match.indexed]] = describe_match(match)
    # (image, split) that came first, by both exact hashes and by the position of the perceptual one in `hashes`
    first: dict[bytes | int, tuple[int, str]] = {}
    new: dict[int, str] = {}  # image -> split
    verdicts: dict[int, Verdict] = {}
    for image, split, sha256, pixels, perceptual in rows:
        keys: list[bytes | int] = [sha256, pixels]
        # the cheapest comparison first
        original, how = first.get(sha256), "byte for byte"
        if original is None:
            original, how = first.get(pixels), "pixel for pixel"
        if perceptual is not None and radius >= 0:
            position = int(np.searchsorted(hashes, np.uint64(unsigned(perceptual))))
            keys.append(position)
            if original is None:
                how = f"at most {radius} of 64 perceptual bits apart"
                # Images with the same hash first, then those with a near one.
                for candidate in (first[p] for p in (position, *near.get(position, ())) if p in first):
                    if _thumbnails_agree(staging.fingerprint_of(candidate[0]), staging.fingerprint_of(image)):
                        original = candidate
                        break
        # a changed copy of an evaluation image that is new itself
        if original is None and (held_out_copies := [copy for copy in copies.get(image, ()) if copy in new]):
            original, how = (held_out_copies[0], new[held_out_copies[0]]), copies[image][held_out_copies[0]]
        if original is None:
            new[image] = split
            for key in keys:
                # The first image of a key stays its original.
                first.setdefault(key, (image, split))
            continue
        path = staging.connection.execute("SELECT path FROM images WHERE id = ?", (original[0],)).fetchone()[0]
        if original[1] == split:
            verdicts[image] = ("duplicate", "image_repeated", f"the same image ({how}) is in this submission as {path}")
        else:
            reason = f"the same image ({how}) is in {original[1]} as {path} of this submission"
            verdicts[image] = ("leak", "leak_from_evaluation", reason)
    _write(staging, verdicts)


def _near_values(values: np.ndarray, radius: int) -> dict[int, set[int]]:
    """Map each position in `values` (sorted, distinct) to the other positions within the radius."""
    near: dict[int, set[int]] = defaultdict(set)
    if radius > 0 and len(values):
        for a, b in HammingIndex(values, radius).pairs(values):
            # `pairs` yields each pair in both directions: use one of them.
            for i, j in zip(a[a < b].tolist(), b[a < b].tolist(), strict=True):
                near[i].add(j)
                near[j].add(i)
    return near


def _undecided(staging: Staging) -> Iterator[tuple[int, str, bytes, bytes, int | None]]:
    yield from staging.connection.execute(
        "SELECT id, split, sha256, pixels, perceptual FROM images WHERE sha256 IS NOT NULL AND verdict IS NULL "
        "ORDER BY id"
    )


def _write(staging: Staging, verdicts: dict[int, Verdict]) -> None:
    # Without explicit transactions every update would be one of its own.
    staging.connection.execute("BEGIN")
    staging.connection.executemany(
        "UPDATE images SET verdict = ?, rule = ?, reason = ? WHERE id = ?",
        [(*verdict, image) for image, verdict in verdicts.items()],
    )
    staging.connection.execute("COMMIT")
