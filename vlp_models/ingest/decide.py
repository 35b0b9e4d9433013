"""Decide which images of a submission are new: not repeated in it, not in the dataset, not in any evaluation split.

Two images are the same if their bytes or pixels are equal, or if their perceptual hashes differ in at most `radius`
bits and their thumbnails agree. For evaluation images, changed copies count as well
(curation/duplicates/search.py). An image in two splits is a leak, and the copy in the lower split (train < val < test)
is rejected; an image twice in one split is a duplicate, and the first one stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from vlp_models.curation.duplicates.alignment import align_by_orientation
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.curation.duplicates.leakage import batches, describe_match, index_in_blocks
from vlp_models.curation.duplicates.search import HammingIndex, Match, NearRules
from vlp_models.curation.duplicates.withdrawn import WithdrawnList
from vlp_models.data.tables import SPLITS
from vlp_models.ingest.index import BATCH_ORIGIN, HashIndex, IndexedImage, unsigned
from vlp_models.ingest.reading import Staging

_RANK = {split: -rank for rank, split in enumerate(SPLITS)}  # test before val before train
Verdict = tuple[str, str, str]  # verdict, rule, reason


def decide(staging: Staging, index: HashIndex, radius: int, near: NearRules, withdrawn: WithdrawnList) -> None:
    """Set the verdict of every image of the submission that is not new.

    Args:
        radius: largest distance of perceptual hashes; -1: only equal bytes or pixels.
        near: rules for changed copies of evaluation images.
    """
    if withdrawn:
        _reject_withdrawn(staging, withdrawn)
    _compare_to_index(staging, index, radius)
    _find_changed_copies(staging, index, near)
    _compare_within_submission(staging, radius, near)


def _reject_withdrawn(staging: Staging, withdrawn: WithdrawnList) -> None:
    verdicts: dict[int, Verdict] = {}
    for image, _, sha256, pixels, _ in _undecided(staging):
        if how := withdrawn.match_hashes(sha256.hex(), pixels.hex(), staging.fingerprint_of(image)):
            verdicts[image] = ("withdrawn", "image_withdrawn", f"the image ({how}) was withdrawn (`vlp forget`)")
    _write(staging, verdicts)


def _compare_to_index(staging: Staging, index: HashIndex, radius: int) -> None:
    verdicts: dict[int, Verdict] = {}
    splits: dict[int, str] = {}

    def add(image: int, number: int, how: str) -> None:
        found = _verdict(splits[image], index.image(number), how)
        if found and (image not in verdicts or verdicts[image][0] == "duplicate"):  # a leak overrides a duplicate
            verdicts[image] = found

    numbers, hashes = [], []
    for image, split, sha256, pixels, perceptual in _undecided(staging):
        splits[image] = split
        same = index.connection.execute(
            "SELECT id, sha256 = ?1 FROM images WHERE sha256 = ?1 OR pixels = ?2", (sha256, pixels)
        )
        for number, bytes_too in same.fetchall():
            add(image, number, "byte for byte" if bytes_too else "pixel for pixel")
        if perceptual is not None:
            numbers.append(image)
            hashes.append(unsigned(perceptual))
    if radius >= 0 and hashes:
        images, held = np.array(numbers), np.array(hashes, np.uint64)
        near = HammingIndex(held, radius)
        for ids, block in index.perceptual_blocks():
            for theirs, ours in near.pairs(block):
                distance = np.bitwise_count(block[theirs] ^ held[ours])
                for number, image, bits in zip(ids[theirs], images[ours], distance, strict=True):
                    if _thumbnails_agree(index.fingerprint_of(int(number)), staging.fingerprint_of(int(image))):
                        add(int(image), int(number), f"{bits} of 64 perceptual bits apart")
    _write(staging, verdicts)


def _thumbnails_agree(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Verify a pair that a hash proposed; without a fingerprint the hash decides."""
    return one is None or other is None or align_by_orientation(one, 0, other) is not None


def _find_changed_copies(staging: Staging, index: HashIndex, rules: NearRules) -> None:
    """Find changed copies of evaluation images, those of the index in the submission and the other way round."""
    verdicts: dict[int, Verdict] = {}
    splits = {image: split for image, split, *_ in _undecided(staging)}

    def add(image: int, number: int, match: Match) -> None:
        found = _verdict(splits[image], index.image(number), describe_match(match))
        if found and (image not in verdicts or verdicts[image][0] == "duplicate"):
            verdicts[image] = found

    for ids, near in index_in_blocks(index.fingerprints(held_out=True), rules):
        for numbers, fingerprints in batches(staging.fingerprints()):
            for match in near.search(fingerprints):
                add(numbers[match.query], ids[match.indexed], match)
    for ids, near in index_in_blocks(staging.fingerprints(held_out=True), rules):
        for numbers, fingerprints in batches(index.fingerprints(held_out=False)):
            for match in near.search(fingerprints):
                add(ids[match.indexed], numbers[match.query], match)
    _write(staging, verdicts)


def _verdict(split: str, known: IndexedImage, how: str) -> Verdict | None:
    if known.split != split:
        rule = "leak_into_evaluation" if known.split == "train" else "leak_from_evaluation"
        return "leak", rule, f"the same image ({how}) is in {known.split} as {known.image_id}"
    if split != "train" or known.origin.startswith(BATCH_ORIGIN):
        return "duplicate", "image_known", f"the same image ({how}) is already there as {known.image_id}"
    return None  # two training sets may share an image


def _compare_within_submission(staging: Staging, radius: int, rules: NearRules) -> None:
    rows = sorted(_undecided(staging), key=lambda row: (_RANK[row[1]], row[0]))
    values = np.unique(np.array([unsigned(row[4]) for row in rows if row[4] is not None], np.uint64))
    near = _near_values(values, radius)
    copies: dict[int, dict[int, str]] = defaultdict(dict)  # image -> evaluation images it is a copy of -> how
    for ids, held in index_in_blocks(staging.fingerprints(held_out=True), rules):
        for numbers, fingerprints in batches(staging.fingerprints()):
            for match in held.search(fingerprints):
                copies[numbers[match.query]][ids[match.indexed]] = describe_match(match)
    kept: dict[bytes | int, tuple[int, str]] = {}  # by both exact hashes, and by the position of the perceptual one
    new: dict[int, str] = {}  # image -> split
    verdicts: dict[int, Verdict] = {}
    for image, split, sha256, pixels, perceptual in rows:
        position = None
        owner, how = kept.get(sha256), "byte for byte"
        if owner is None:
            owner, how = kept.get(pixels), "pixel for pixel"
        if perceptual is not None and radius >= 0:
            position = int(np.searchsorted(values, np.uint64(unsigned(perceptual))))
            if owner is None:
                how = f"at most {radius} of 64 perceptual bits apart"
                owners = (kept[p] for p in (position, *near.get(position, ())) if p in kept)
                alike = (
                    o for o in owners if _thumbnails_agree(staging.fingerprint_of(o[0]), staging.fingerprint_of(image))
                )
                owner = next(alike, None)
        if owner is None and (held_copies := [o for o in copies.get(image, ()) if o in new]):
            owner, how = (held_copies[0], new[held_copies[0]]), copies[image][held_copies[0]]
        if owner is None:
            new[image] = split
            for key in (sha256, pixels) if position is None else (sha256, pixels, position):
                kept.setdefault(key, (image, split))
            continue
        path = staging.connection.execute("SELECT path FROM images WHERE id = ?", (owner[0],)).fetchone()[0]
        if owner[1] == split:
            verdicts[image] = ("duplicate", "image_repeated", f"the same image ({how}) is in this submission as {path}")
        else:
            reason = f"the same image ({how}) is in {owner[1]} as {path} of this submission"
            verdicts[image] = ("leak", "leak_from_evaluation", reason)
    _write(staging, verdicts)


def _near_values(values: np.ndarray, radius: int) -> dict[int, set[int]]:
    """Map each position in `values` (sorted, distinct) to the other positions within the radius."""
    near: dict[int, set[int]] = defaultdict(set)
    if radius > 0 and len(values):
        for a, b in HammingIndex(values, radius).pairs(values):
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
    staging.connection.execute("BEGIN")
    staging.connection.executemany(
        "UPDATE images SET verdict = ?, rule = ?, reason = ? WHERE id = ?",
        [(*verdict, image) for image, verdict in verdicts.items()],
    )
    staging.connection.execute("COMMIT")
