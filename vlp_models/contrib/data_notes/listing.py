"""Check a listing of pairs before any image is opened: rows, files, and how many images each split gets."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vlp_models.data.formats.base import Tables
from vlp_models.data.formats.pairs import PairsParams, read_mention, read_records
from vlp_models.data.formats.splits import Division, split_held_out
from vlp_models.data.names import FileNames

CHECKED_IMAGES = 1000  # whose files `check_pairs` looks for
MISSING = "missing"  # in the place of a split


@dataclass(frozen=True)
class PairsCheck:
    """What a listing contains, before any image is opened.

    images    number of images that each split gets, without near-duplicates grouped
    problems  a sentence for rows that cannot be read, images that are missing and columns that are ignored
    """

    images: Counter[str]
    problems: list[str]


def check_pairs(name: str, params: PairsParams, base: Path) -> PairsCheck:
    """Read the listing of pairs, look for the first `CHECKED_IMAGES` image files, and count the images."""
    splits: dict[str, str] = {}
    groups: dict[str, str] = {}
    tables, names = Tables(), FileNames()
    missing: list[str] = []
    for path, prefix, _, provenance, record in islice(read_records(name, params, base, tables), params.limit or None):
        # for messages: the file's path and the line
        where = f"{os.path.relpath(path, base)}:{provenance.rpartition(':')[2]}"
        with tables.record("captions", where):
            mention = read_mention(record, path, prefix)
            key = mention["key"]
            # Looking for every file of a large dataset takes too long: the first ones show whether paths are right.
            if (
                key not in splits
                and len(splits) < CHECKED_IMAGES
                and (reason := _find_image(mention["path"], path, names))
            ):
                missing.append(f"{where}: {reason}")
                mention["split"] = MISSING
            splits.setdefault(key, mention["split"])
            groups.setdefault(key, mention["together"] or key)
    # the splits that `read` gives the present images: their own with a part of train held out, or a division
    present = {key: split for key, split in splits.items() if split != MISSING}
    problems = _describe_problems(tables, missing, min(len(splits), CHECKED_IMAGES))
    if any(present.values()):
        counts = Counter(
            split_held_out(groups[key], params.val_fraction) if split == "train" else split
            for key, split in present.items()
        )
        return PairsCheck(counts, problems)
    division = Division(groups[key] for key in present)
    return PairsCheck(Counter(division.split_of(groups[key]) for key in present), problems)


def _find_image(image: str, listing: Path, names: FileNames) -> str:
    """Return why an image's file is not found, or is ambiguous; empty if it exists."""
    if os.path.lexists(image):
        return ""
    relative = os.path.relpath(image, listing.parent)
    candidates = names.find(listing.parent, relative)
    if len(candidates) == 1:
        return ""
    return f"{relative}: no such file{names.explain(listing.parent, relative, candidates)}"


def _describe_problems(tables: Tables, missing: list[str], checked: int) -> list[str]:
    problems = []
    if bad := list(tables["quarantine"]):
        rows = "1 row cannot" if len(bad) == 1 else f"{len(bad):,} rows cannot"
        problems.append(
            f"{rows} be read{', the first' if len(bad) > 1 else ''}: {bad[0]['provenance']}: {bad[0]['reason']}"
        )
    if missing:
        images = "1 image is" if len(missing) == 1 else f"{len(missing):,} of the first {checked:,} images are"
        problems.append(f"{images} missing{', the first' if len(missing) > 1 else ''}: {missing[0]}")
    if ignored := tables.describe_ignored():
        problems.append(ignored)
    return problems
