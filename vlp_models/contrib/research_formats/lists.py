"""Splits of research datasets: lists of photos, and files that are one split each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from vlp_models.data.formats.base import RecordError, Tables, is_utf8
from vlp_models.data.formats.files import read_text
from vlp_models.data.formats.splits import SplitsParams, check_splits, photo_id, read_karpathy
from vlp_models.data.images import FORMATS
from vlp_models.data.tables import standard_split
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FOLDERS = ("Images", "Flicker8k_Dataset", "Flickr8k_Dataset", "flickr30k-images", "flickr30k_images")
TEXT_FOLDERS = ("", "Flickr8k_text")  # of lists and captions


@dataclass(frozen=True, kw_only=True)
class ListedParams(SourceParams):
    """Keys of the formats whose splits are lists of photos."""

    file_keys: ClassVar[tuple[str, ...]] = ("split_files", "karpathy")

    split_files: dict[str, list[str]] = field(default_factory=dict)  # image lists by split
    karpathy: str = ""  # Karpathy file that assigns the splits


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


def check_unused(key: str, local: str, used_in: Mapping[str, str]) -> None:
    """Check that an id is that of no earlier record.

    Args:
        used_in: id -> provenance of its record.

    Raises:
        RecordError: under the rule `id_unique`.
    """
    if local in used_in:
        raise RecordError(f"{key} {local} is already used in {used_in[local]}", rule="id_unique")
