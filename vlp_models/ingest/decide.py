"""Which pictures of a drop are new: not in the drop already, not in the dataset, and in no split that is tested on.

Two pictures are one if their bytes or their pixels are equal, or their perceptual hashes differ in at most `radius`
bits and their small copies look the same. Of what is tested on, changed copies count as well (duplicates/search.py).
One picture in two splits is a leak, and it is the copy that would be learnt from that goes; one picture twice in a
split is a duplicate, and the first stays.
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
from vlp_models.ingest.index import HELD, HashIndex, Known, unsigned
from vlp_models.ingest.reading import Staging

_RANK = {split: -rank for rank, split in enumerate(SPLITS)}  # test before val before train
Verdict = tuple[str, str, str]  # verdict, rule, reason


def decide(staging: Staging, index: HashIndex, radius: int, near: NearRules, withdrawn: WithdrawnList) -> None:
    """Writes a verdict to every picture of the drop that is not new. `radius` -1: equal bytes or pixels only.
    `near`: for changed copies of what is tested on."""
    if withdrawn:
        _withdrawn(staging, withdrawn)
    _against_index(staging, index, radius)
    _changed_copies(staging, index, near)
    _within_drop(staging, radius, near)


def _withdrawn(staging: Staging, withdrawn: WithdrawnList) -> None:
    verdicts: dict[int, Verdict] = {}
    for image, _, sha256, pixels, _ in _undecided(staging):
        if how := withdrawn.match_hashes(sha256.hex(), pixels.hex(), staging.print_of(image)):
            verdicts[image] = ("withdrawn", "image_withdrawn", f"the picture, {how}, was withdrawn (`vlp forget`)")
    _write(staging, verdicts)


def _against_index(staging: Staging, index: HashIndex, radius: int) -> None:
    verdicts: dict[int, Verdict] = {}
    splits: dict[int, str] = {}

    def meet(image: int, number: int, how: str) -> None:
        found = _judge(splits[image], index.known(number), how)
        if found and (image not in verdicts or verdicts[image][0] == "duplicate"):  # a leak says more
            verdicts[image] = found

    numbers, hashes = [], []
    for image, split, sha256, pixels, perceptual in _undecided(staging):
        splits[image] = split
        same = index.connection.execute(
            "SELECT id, sha256 = ?1 FROM images WHERE sha256 = ?1 OR pixels = ?2", (sha256, pixels)
        )
        for number, bytes_too in same.fetchall():
            meet(image, number, "byte for byte" if bytes_too else "pixel for pixel")
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
                    if _look_the_same(index.print_of(int(number)), staging.print_of(int(image))):
                        meet(int(image), int(number), f"{bits} of 64 perceptual bits apart")
    _write(staging, verdicts)


def _look_the_same(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """What a hash proposes, by the small copies; a picture of an older batch has none, and the hash decides."""
    return one is None or other is None or align_by_orientation(one, 0, other) is not None


def _changed_copies(staging: Staging, index: HashIndex, rules: NearRules) -> None:
    """Of what is tested on, there or in the drop: neither side may learn from it."""
    verdicts: dict[int, Verdict] = {}
    splits = {image: split for image, split, *_ in _undecided(staging)}

    def meet(image: int, number: int, match: Match) -> None:
        found = _judge(splits[image], index.known(number), describe_match(match))
        if found and (image not in verdicts or verdicts[image][0] == "duplicate"):
            verdicts[image] = found

    for ids, near in index_in_blocks(index.fingerprints(tested=True), rules):
        for numbers, fingerprints in batches(staging.fingerprints()):
            for match in near.search(fingerprints):
                meet(numbers[match.query], ids[match.indexed], match)
    for ids, near in index_in_blocks(staging.fingerprints(tested=True), rules):
        for numbers, fingerprints in batches(index.fingerprints(tested=False)):
            for match in near.search(fingerprints):
                meet(ids[match.indexed], numbers[match.query], match)
    _write(staging, verdicts)


def _judge(split: str, known: Known, how: str) -> Verdict | None:
    if known.split != split:
        rule = "leak_into_evaluation" if known.split == "train" else "leak_from_evaluation"
        return "leak", rule, f"the same picture, {how}, is in {known.split} as {known.image_id}"
    if split != "train" or known.origin.startswith(HELD):
        return "duplicate", "image_known", f"the same picture, {how}, is there as {known.image_id}"
    return None  # two training sets may share a picture


def _within_drop(staging: Staging, radius: int, rules: NearRules) -> None:
    rows = sorted(_undecided(staging), key=lambda row: (_RANK[row[1]], row[0]))
    values = np.unique(np.array([unsigned(row[4]) for row in rows if row[4] is not None], np.uint64))
    near = _neighbours(values, radius)
    copies: dict[int, dict[int, str]] = defaultdict(dict)  # picture -> of which pictures of the drop, and how
    for ids, held in index_in_blocks(staging.fingerprints(tested=True), rules):
        for numbers, fingerprints in batches(staging.fingerprints()):
            for match in held.search(fingerprints):
                copies[numbers[match.query]][ids[match.indexed]] = describe_match(match)
    kept: dict[bytes | int, tuple[int, str]] = {}  # by either exact hash, and by the place of the perceptual one
    new: dict[int, str] = {}  # picture -> split
    verdicts: dict[int, Verdict] = {}
    for image, split, sha256, pixels, perceptual in rows:
        place = None
        owner, how = kept.get(sha256), "byte for byte"
        if owner is None:
            owner, how = kept.get(pixels), "pixel for pixel"
        if perceptual is not None and radius >= 0:
            place = int(np.searchsorted(values, np.uint64(unsigned(perceptual))))
            if owner is None:
                how = f"at most {radius} of 64 perceptual bits apart"
                owners = (kept[p] for p in (place, *near.get(place, ())) if p in kept)
                alike = (o for o in owners if _look_the_same(staging.print_of(o[0]), staging.print_of(image)))
                owner = next(alike, None)
        if owner is None and (held_copies := [o for o in copies.get(image, ()) if o in new]):
            owner, how = (held_copies[0], new[held_copies[0]]), copies[image][held_copies[0]]
        if owner is None:
            new[image] = split
            for key in (sha256, pixels) if place is None else (sha256, pixels, place):
                kept.setdefault(key, (image, split))
            continue
        path = staging.connection.execute("SELECT path FROM images WHERE id = ?", (owner[0],)).fetchone()[0]
        if owner[1] == split:
            verdicts[image] = ("duplicate", "image_repeated", f"the same picture, {how}, is in this drop as {path}")
        else:
            reason = f"the same picture, {how}, is in {owner[1]} as {path} of this drop"
            verdicts[image] = ("leak", "leak_from_evaluation", reason)
    _write(staging, verdicts)


def _neighbours(values: np.ndarray, radius: int) -> dict[int, set[int]]:
    """Places in `values` (sorted, distinct) -> the other places within the radius."""
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
