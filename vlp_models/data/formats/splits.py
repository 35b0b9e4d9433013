"""Splits: lists of photos, Karpathy's split files, and hashes.

A photo of Flickr is identified by its Flickr id. Flickr8k calls a photo `2181846120_3744ca3942.jpg`, Flickr30k and
SNLI-VE call the same one `2181846120.jpg`. So one list divides them all alike, and photos held out of one are held out
of the others. Any other name (`IMG_0001.jpg`) is an id of its own, without the suffix.

A Karpathy file (dataset_coco.json, dataset_flickr30k.json) lists the images of each split. `restval`, the part of
COCO's val2014 that is neither val nor test, is read as train, as in every paper. Flickr30k's file has no `cocoid`:
there an image's id is its file name without the suffix, and the file has the captions too.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from vlp_models.data.formats.base import RecordError, Tables, get, get_id, get_sentence, get_text
from vlp_models.data.formats.files import read_records
from vlp_models.data.images import FORMATS
from vlp_models.data.tables import SPLITS, standard_split
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

# an id and a secret of ten hexadecimal digits, not the date and time of a camera's `20240131_123059.jpg`
_FLICKR_NAME = re.compile(r"([0-9]+)_[0-9a-f]{10}(?![0-9A-Za-z])")


@dataclass(frozen=True, kw_only=True)
class SplitsParams(SourceParams):
    """Keys of the formats whose splits are files."""

    splits: list[str] = field(default_factory=list)  # splits to read; empty: all present


def check_splits(where: str, splits: Iterable[str], also: str = "") -> None:
    """Check the splits that are keys of `where` in params.yaml.

    Raises:
        DataError: one is neither a split nor `also`.
    """
    valid_splits = [*SPLITS, also] if also else SPLITS
    for split in splits:
        if split not in valid_splits:
            raise DataError(f"params.yaml: {where}.{split}: expected one of {', '.join(valid_splits)}")


def photo_id(file: str) -> str:
    """Return `2181846120` for `2181846120_3744ca3942.jpg`, `IMG_0001` for `IMG_0001.jpg`."""
    name = unicodedata.normalize("NFC", Path(file.replace("\\", "/")).name)  # lists and captions may differ in form
    flickr = _FLICKR_NAME.match(name)
    return flickr[1] if flickr else stem(name)


def stem(file: str) -> str:
    """Return a file name without an image suffix; other dots are part of the name."""
    path = Path(file)
    return path.stem if path.suffix.lower() in FORMATS else path.name


def hold_out(tables: Tables, params: SourceParams, image_id: str, unit: str, split: str = "train") -> str:
    """Return the split of an image: val for `params.val_fraction` of the units of train, else unchanged.

    With `params.group_near_duplicates` the unit is recorded: `prepare` joins the units of near-duplicates and divides
    them again.

    Args:
        unit: what stays together: the photo's id, or its group.
    """
    if split != "train":
        return split
    if params.val_fraction and params.group_near_duplicates:
        tables.held_out[image_id] = unit
    return split_held_out(unit, params.val_fraction)


def split_held_out(unit: str, share: float) -> str:
    """Return val for the `share` of the units that is held out of train, else train.

    Decided by a hash of its id: the same photos on every machine and in every dataset.
    """
    return "val" if bucket_of(unit) < share else "train"


class Division:
    """The division of images into train (80%), val (10%) and test (10%), by a hash of their units.

    A unit is what stays together: an image's path, or its group. Adding units does not move others, except if a split
    of a handful would be empty: three units or more give at least one of each.
    """

    MANY = 1000  # with this many units a split is empty with probability 1e-45; fewer must all be known

    def __init__(self, units: Iterable[str]) -> None:
        # all units if they are few: only then may a split be empty
        few: set[str] = set()
        for unit in units:
            few.add(unit)
            if len(few) > self.MANY:
                few.clear()
                break
        self._few = split_by_hash(few)

    def split_of(self, unit: str) -> str:
        return self._few.get(unit) or _split(unit)


def split_by_hash(names: Iterable[str]) -> dict[str, str]:
    """Return name -> train (80%), val (10%) or test (10%). Three names or more give at least one of each."""
    # the names next to a split's edge are moved into an empty split
    order = sorted(names, key=bucket_of)
    splits = {name: _split(name) for name in order}
    # val twice: the name taken for train may have been the only one of val.
    for missing_split, candidate in (("test", -1), ("val", -2), ("train", 0), ("val", -2)):
        if len(order) >= 3 and missing_split not in splits.values():
            splits[order[candidate]] = missing_split
    return splits


def _split(name: str) -> str:
    bucket = bucket_of(name)
    if bucket < 0.8:
        return "train"
    return "val" if bucket < 0.9 else "test"


class Clusters:
    """Names that belong together, directly or through others."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def join(self, name: str, other: str) -> None:
        # the first name of the joined cluster represents it
        # The smaller name always becomes the parent, so the result does not depend on the order of joins.
        low, high = sorted((self.first(name), self.first(other)))
        self._parents[high] = low

    def first(self, name: str) -> str:
        """Return the first name, in the order of their characters, of those that belong to `name`."""
        first = name
        while (parent := self._parents.get(first, first)) != first:
            first = parent
        while (parent := self._parents.get(name, name)) != first:  # shorten the way for the next search
            self._parents[name], name = first, parent
        return first


@dataclass(frozen=True, kw_only=True)
class KarpathyEntry:
    """One image of the split file. `sentences` are (id, text)."""

    split: str
    filepath: str  # folder below the images' directory: `val2014`, or empty
    filename: str
    sentences: tuple[tuple[str, str], ...]
    provenance: str


def read_karpathy(path: Path, tables: Tables, sentences: bool) -> dict[str, KarpathyEntry]:
    """Return image id -> entry.

    sentences: False skips the captions, for datasets that have them in a separate file.

    Raises:
        DataError: the file is missing or not a Karpathy split file.
    """
    entries: dict[str, KarpathyEntry] = {}
    for provenance, record in read_records(path, "images", "a Karpathy split file"):
        with tables.record("images", provenance):
            filename = safe_name(get_text(record, "filename"))
            # Flickr's files have no `cocoid`
            image_id = PurePosixPath(filename).stem if record.get("cocoid") is None else get_id(record, "cocoid")
            split = standard_split(get_text(record, "split"))
            folder = safe_name(get_text(record, "filepath")) if record.get("filepath") else ""
            captions: list[tuple[str, str]] = []
            for index, sentence in enumerate(get(record, "sentences", list) if sentences else ()):
                with tables.record("captions", f"{provenance}.sentences[{index}]"):
                    captions.append((get_id(sentence, "sentid"), get_sentence(sentence, "raw")))
            entry = KarpathyEntry(
                split=split, filepath=folder, filename=filename, sentences=tuple(captions), provenance=provenance
            )
            if image_id in entries:
                first = entries[image_id]
                raise RecordError(
                    f"image {image_id} is listed again, as {entry.split}; {first.provenance} has it as {first.split}",
                    rule="id_unique",
                )
            entries[image_id] = entry
    return entries


def safe_name(name: str) -> str:
    """Return the relative path of an annotation file with forward slashes; files from Windows have backslashes.

    Raises:
        RecordError: it leaves the dataset's directory.
    """
    # `C:/` is absolute on Windows only
    slashes = name.replace("\\", "/")
    path = PurePosixPath(slashes)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or re.match("[A-Za-z]:/", slashes):
        raise RecordError(f"{name!r} is not a path inside the dataset", rule="path_inside")
    return slashes


def bucket_of(name: str) -> float:
    """Return a number in [0, 1) by a hash of the name, the same on every machine, to divide data without splits."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    # 64 bits of the hash, divided by their range.
    return int.from_bytes(digest[:8], "big") / 2**64
