"""Drops: folders (or listings) of pairs that somebody puts down.

A drop is finished once nothing in it has changed for a while. What counts is the inode's change time: the kernel
sets it, so a copy that preserves old dates can't pass for finished. Whoever reads takes a snapshot before and
compares it after, so a drop that changes under the reader is left alone, too.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlp_models.data.formats.base import printable
from vlp_models.data.formats.pairs import DELIMITERS, JSON_LINES

DONE = "done"  # accepted drops move here
LISTINGS = (*DELIMITERS, *JSON_LINES)


@dataclass(frozen=True)
class Snapshot:
    """`changed` is the newest change time, in seconds since the epoch.

    `id` hashes every file's name, size, inode and times: another drop can't share it, nor this one after any change.
    """

    id: str
    changed: float
    files: int


@dataclass(frozen=True)
class Drop:
    """`folder`: what image paths are relative to, and may not leave."""

    name: str
    folder: Path
    listing: Path
    loose: bool = False  # a listing that lies in the drop folder itself
    owned: bool = False  # DVC's: it stays where it is, and is finished when DVC is

    def snapshot(self) -> Snapshot:
        """Looks at every name in the drop; opens nothing. A drop that shrinks meanwhile has changed just now."""
        root, lines, changed = str(self.folder), [], 0.0
        try:
            for path, status in self._entries():
                changed = max(changed, status.st_ctime)
                if not stat.S_ISDIR(status.st_mode):
                    about = f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
                    lines.append(f"{path[len(root) :]}\0{about}".encode("utf-8", "surrogateescape"))
        except FileNotFoundError:
            return Snapshot("", math.inf, 0)
        digest = hashlib.sha256(b"\n".join(sorted(lines)))
        return Snapshot(digest.hexdigest(), changed, len(lines))

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        if not self.loose:
            yield str(self.folder), self.folder.lstat()
            yield from _walk(str(self.folder))
            return
        yield str(self.listing), self.listing.lstat()
        for entry in sorted(self.folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink() and not _ignored(entry) and not _listings(entry):
                yield str(entry), entry.lstat()
                yield from _walk(str(entry))


def find_drops(folder: Path | None, owned: list[Path]) -> tuple[list[Drop], list[str]]:
    """The drops in `folder` (None: there is none) and the folders `owned` by DVC, by name; and a line on each thing
    that is no drop.

    A drop is a sub-folder with one listing at its top, or a listing in `folder` itself with the images it names.
    """
    drops, notes = [], []
    entries = (
        [path for path in sorted(folder.iterdir()) if not _ignored(path)]
        if folder is not None and folder.is_dir()
        else []
    )
    loose = [path for path in entries if path.suffix.lower() in LISTINGS and path.is_file() and not path.is_symlink()]
    drops += [Drop(printable(path.name), path.parent, path, loose=True) for path in loose]
    folders = [path for path in entries if path.is_dir() or path.is_symlink()]
    for path in dict.fromkeys([*folders, *owned]):
        if path.is_symlink():
            notes.append(f"{path}: a symbolic link; links are not followed")
            continue
        found = _listings(path)
        if len(found) == 1:
            tracked = path in owned or os.path.exists(f"{path}.dvc")  # noqa: PTH110 - Path raises for a name too long
            drops.append(Drop(printable(path.name), path, found[0], owned=tracked))
        elif found:
            notes.append(f"{path}: {len(found)} listings ({', '.join(p.name for p in found[:3])}); a drop has one")
        elif not loose:
            notes.append(f"{path}: no {', '.join(LISTINGS)} at its top")
    return drops, [printable(note) for note in notes]


def _ignored(path: Path) -> bool:
    return path.name.startswith(".") or path.name == DONE or path.suffix == ".dvc"


def _listings(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in LISTINGS and not _ignored(path) and path.is_file() and not path.is_symlink()
    )


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    folders = [folder]  # no recursion: how deep a drop nests is its maker's choice
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                yield entry.path, status
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)
