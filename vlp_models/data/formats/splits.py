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
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from vlp_models.data.formats.base import RecordError, Tables, get, get_id, get_sentence, get_text, is_utf8
from vlp_models.data.formats.files import read_records, read_text
from vlp_models.data.images import FORMATS
from vlp_models.data.tables import SPLITS, standard_split
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FOLDERS = ("Images", "Flicker8k_Dataset", "Flickr8k_Dataset", "flickr30k-images", "flickr30k_images")
# an id and a secret of ten hexadecimal digits, not the date and time of a camera's `20240131_123059.jpg`
_FLICKR_NAME = re.compile(r"([0-9]+)_[0-9a-f]{10}(?![0-9A-Za-z])")
TEXT_FOLDERS = ("", "Flickr8k_text")  # of lists and captions


@dataclass(frozen=True, kw_only=True)
class SplitsParams(SourceParams):
    """Keys of the formats whose splits are files."""

    splits: list[str] = field(default_factory=list)  # splits to read; empty: all present


@dataclass(frozen=True, kw_only=True)
class ListedParams(SourceParams):
    """Keys of the formats whose splits are lists of photos."""

    file_keys: ClassVar[tuple[str, ...]] = ("split_files", "karpathy")

    split_files: dict[str, list[str]] = field(default_factory=dict)  # image lists by split
    karpathy: str = ""  # Karpathy file that assigns the splits


def check_splits(where: str, splits: Iterable[str], also: str = "") -> None:
    """Check the splits that are keys of `where` in params.yaml.

    Raises:
        DataError: one is neither a split nor `also`.
    """
    valid_splits = [*SPLITS, also] if also else SPLITS
    for split in splits:
        if split not in valid_splits:
            raise DataError(f"params.yaml: {where}.{split}: expected one of {', '.join(valid_splits)}")


def select_splits(
    name: str,
    dataset: str,
    params: SplitsParams,
    valid_splits: Iterable[str],
    files: Mapping[str, Path],
    *,
    also: str = "",
) -> list[str]:
    """Return `params.splits`, or all splits whose file exists.

    Args:
        dataset: the format's name, for errors.
        valid_splits: names that `params.splits` may have.
        files: file of each split.
        also: a file that holds all splits instead, for errors.

    Raises:
        DataError: an unknown split, or no split has a file.
    """
    valid_splits = list(valid_splits)
    # `dev` is a split of its own in NLVR and val elsewhere
    names = [split if split in valid_splits else standard_split(split) for split in params.splits]
    requested = list(dict.fromkeys(names))
    for split in requested:
        if split not in valid_splits:
            raise DataError(
                f"params.yaml: data.{name}.splits: {dataset} has no split {split!r}; known: {', '.join(valid_splits)}"
            )
    splits = requested or [split for split, file in files.items() if file.is_file()]
    if not splits:
        root = Path(os.path.commonpath([file.parent for file in files.values()]))
        missing = [also] if also else []
        missing += [str(file.relative_to(root)) for file in files.values()]
        raise DataError(f"{root}: contains none of {', '.join(missing)}; is it {dataset}'s folder?")
    return splits


def text_folders(root: Path) -> list[Path]:
    return [root / folder for folder in TEXT_FOLDERS]


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


def photo_folder(root: Path, images: str) -> Path:
    """Return `images` below `root`, or the first existing folder with one of the usual names of Flickr's photos."""
    return next((root / folder for folder in (images, *FOLDERS) if (root / folder).is_dir()), root / images)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Splits and file names by photo id. files: only if the lists have names with a suffix."""

    splits: dict[str, str]
    files: dict[str, str]


def read_lists(name: str, params: ListedParams, root: Path, official: Mapping[str, str], tables: Tables) -> Listed:
    """Return the photos with their splits, from the Karpathy file, `params.split_files`, or the official lists.

    A photo with two splits belongs to the first one; the second mention is quarantined. `params.val_fraction` is for
    the caller (`hold_out`).

    Args:
        root: the dataset's directory; lists are looked for there and in `Flickr8k_text`.
        official: split -> name of its list.

    Raises:
        DataError: no list exists, or one that `split_files` names does not.
    """
    folders = text_folders(root)
    # filled by `_add_listed`: photo -> split, and photo -> file name
    splits: dict[str, str] = {}
    names: dict[str, str] = {}
    if params.karpathy:
        entries = read_karpathy(_find(params.karpathy, folders), tables, sentences=False)
        for entry in entries.values():
            _add_listed(entry.filename, entry.split, entry.provenance, splits, names, tables)
    else:
        files = dict(params.split_files)
        if not files:
            for split, file in official.items():
                if any((folder / file).is_file() for folder in folders):
                    files[split] = [file]
        if not files:
            raise DataError(
                f"data.{name}: {root} contains none of {', '.join(official.values())}, which define the "
                f"splits; put the official lists there, or name your own in data.{name}.split_files"
            )
        check_splits(f"data.{name}.split_files", files)
        for split, several in files.items():
            for path in (_find(file, folders) for file in several):
                lines = read_text(path, f"the names of the photos of {split}").split("\n")
                for number, line in enumerate(lines, start=1):
                    file, provenance = line.strip(), f"{path.name}:{number}"
                    if not is_utf8(line):
                        tables.quarantine("images", "", "text_utf8", f"not UTF-8: {line[:40]!r}", provenance)
                    elif file:
                        _add_listed(file, split, provenance, splits, names, tables)
    return Listed(splits=splits, files=names)


def _find(file: str, folders: list[Path]) -> Path:
    return next((folder / file for folder in folders if (folder / file).is_file()), folders[0] / file)


def _add_listed(
    file: str, split: str, provenance: str, splits: dict[str, str], names: dict[str, str], tables: Tables
) -> None:
    photo = photo_id(file)
    if splits.setdefault(photo, split) != split:
        reason = f"photo {photo} is already listed as {splits[photo]}"
        tables.quarantine("images", "", "split_disjoint", reason, provenance)
    # a name with a suffix is a file's; Entities' lists have bare ids
    elif Path(file).suffix.lower() in FORMATS:
        names.setdefault(photo, file)


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
