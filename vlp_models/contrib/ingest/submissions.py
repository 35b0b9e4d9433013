"""Submissions: folders (or listings) of image-caption pairs in the inbox.

A submission is complete once nothing in it has changed for a while, by the inode's change time: the kernel sets it, so
a copy that preserves old dates does not look complete. The reader compares a snapshot before and after reading, so a
submission that changes meanwhile is left for later.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlp_models.data.formats.base import printable
from vlp_models.data.formats.pairs import DELIMITERS, JSON_LINES
from vlp_models.errors import DataError, explain_system_error

DONE = "done"  # folder of the inbox that ingested submissions move to
LISTINGS = (*DELIMITERS, *JSON_LINES)


@dataclass(frozen=True)
class Snapshot:
    """The state of a submission's files.

    id    hash of every file's name, size, inode and times; any change changes it
    age   seconds between now and the nearest change, also one in the future: the clock was ahead when it was recorded
    """

    id: str
    age: float
    files: int


@dataclass(frozen=True)
class Submission:
    """A listing of pairs and the folder that its image paths are relative to and must not leave.

    loose         the listing is in the inbox itself, next to its images or their folders
    dvc_tracked   DVC tracks the folder: it stays in place, and is complete once DVC is done
    """

    name: str
    folder: Path
    listing: Path
    loose: bool = False
    dvc_tracked: bool = False

    def snapshot(self) -> Snapshot:
        """Stat every file without opening any. A file that disappears meanwhile counts as a change just now."""
        root, lines, age, now = str(self.folder), [], math.inf, time.time()
        try:
            # Directories count for the age, but only files for the hash.
            for path, status in self._entries():
                # the change time is the kernel's; a clock that was ahead gives a time in the future
                age = min(age, abs(now - status.st_ctime))
                if not stat.S_ISDIR(status.st_mode):
                    about = f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
                    lines.append(f"{path[len(root) :]}\0{about}".encode("utf-8", "surrogateescape"))
        except FileNotFoundError:
            return Snapshot("", -math.inf, 0)
        # Sorted, since the file system lists names in any order.
        digest = hashlib.sha256(b"\n".join(sorted(lines)))
        return Snapshot(digest.hexdigest(), age, len(lines))

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        if not self.loose:
            yield str(self.folder), self.folder.lstat()
            yield from _walk(str(self.folder))
            return
        # a listing in the inbox: its images and their folders, but no other submission
        yield str(self.listing), self.listing.lstat()
        for entry in sorted(self.folder.iterdir()):
            status = entry.lstat()
            if _ignored(entry):
                continue
            if stat.S_ISREG(status.st_mode) and entry.suffix.lower() not in LISTINGS:
                yield str(entry), status
            elif stat.S_ISDIR(status.st_mode) and not _has_listing(entry):
                yield str(entry), status
                yield from _walk(str(entry))


def find_submissions(inbox: Path | None, tracked: list[Path]) -> tuple[list[Submission], list[str]]:
    """Find the submissions in the inbox (None: no inbox) and the folders that DVC tracks.

    A submission is a subfolder with one listing at its top, or a listing in the inbox itself with the images it names.

    Returns:
        The submissions, and a line on each entry that is not one.

    Raises:
        DataError: the inbox is a file.
    """
    if inbox is not None and inbox.is_file():
        raise DataError(f"{inbox}: a file, not a folder; `ingest.inbox` is the folder where submissions arrive")
    submissions, notes = [], []
    entries: list[Path] = []
    if inbox is not None and inbox.is_dir():
        entries = [path for path in sorted(inbox.iterdir()) if not _ignored(path)]
    # listings in the inbox itself, whose images may be anywhere in it
    loose = [path for path in entries if path.suffix.lower() in LISTINGS and path.is_file() and not path.is_symlink()]
    submissions += [Submission(printable(path.name), path.parent, path, loose=True) for path in loose]
    folders = [path for path in entries if path.is_dir() or path.is_symlink()]
    for path in dict.fromkeys([*folders, *tracked]):
        if path.is_symlink():
            notes.append(f"{path}: a symbolic link; links are not followed")
            continue
        try:
            listings = _listings(path)
        except OSError as error:
            notes.append(f"{path}: unreadable: {explain_system_error(error)}")
            continue
        if len(listings) == 1:
            # A .dvc file next to the folder means that DVC tracks it, although `ingest.fetch` does not name it.
            by_dvc = path in tracked or os.path.exists(f"{path}.dvc")  # noqa: PTH110 - Path raises for a name too long
            submissions.append(Submission(printable(path.name), path, listings[0], dvc_tracked=by_dvc))
        elif listings:
            names = ", ".join(listing.name for listing in listings[:3])
            notes.append(f"{path}: {len(listings)} listings ({names}); a submission has one")
        elif not loose:
            notes.append(f"{path}: no {', '.join(LISTINGS)} at its top")
    return submissions, [printable(note) for note in notes]


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


def _has_listing(folder: Path) -> bool:
    try:
        return bool(_listings(folder))
    except PermissionError:
        return False


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below a folder; nothing of a folder that may not be read, where images cannot be read either."""
    folders = [folder]  # no recursion: a submission may nest folders to any depth
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except PermissionError:
            continue
        with entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                yield entry.path, status
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)
