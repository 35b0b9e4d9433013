"""What the file system of a project does not do, and what follows from it; each call is tried in a temporary folder."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from vlp_models.common.lock import explain_no_locks, try_lock
from vlp_models.common.workspace import dvc_setting
from vlp_models.errors import DataError, explain_system_error

LONG_NAME = 200  # bytes; while a file is written, its name is longer by about 20
FICLONE = 0x40049409  # Linux's ioctl that makes a reflink
Limit = tuple[Literal["note", "problem"], str]


def find_limits(root: Path) -> Iterator[Limit]:
    """Yield what does not work in a project's folder: a level, and a sentence with the consequence or the way out.

    Raises:
        OSError: no file can be written there.
    """
    if "?" in str(root.absolute()):
        yield "problem", f"{root}: MLflow cannot open a database in a folder with `?` in its name; rename it"
    with tempfile.TemporaryDirectory(dir=root, prefix=".vlp-doctor-") as scratch:
        folder = Path(scratch)
        (folder / "file").write_text("1")
        try:
            _check_locks(folder)
        except DataError as error:
            yield "problem", str(error).replace(str(folder), str(root), 1)
        for level, call, subject, consequence in CALLS:
            try:
                call(folder)
            except OSError as error:
                yield level, f"{subject} ({_reason(error)}): {consequence}"
        if (folder / "FILE").exists():
            yield "note", "upper and lower case are the same here: names that differ in case only overwrite each other"
        decomposed = unicodedata.normalize("NFD", "\u00e9")
        (folder / "\u00e9").touch()
        if any(path.name == decomposed for path in folder.iterdir()):
            yield "note", "names with accents are stored decomposed (NFD), so a listing may have other names"
    yield from _find_cache_limits(root)


def _check_locks(folder: Path) -> None:
    """Lock a temporary file in a folder; raise a DataError if the file system has no locks."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try_lock(file.fileno(), folder)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(explain_no_locks(folder, "fcntl, which MLflow's database needs", error)) from None


def _replace_open_file(folder: Path) -> None:
    (folder / "new").write_text("2")
    with (folder / "file").open():
        (folder / "new").replace(folder / "file")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # not `sync_to_disk`, which accepts that
    finally:
        os.close(descriptor)


CALLS: tuple[tuple[Literal["note", "problem"], Callable[[Path], object], str, str], ...] = (
    (
        "problem",
        lambda folder: (folder / "file").chmod(0o600),
        "permissions cannot be changed",
        "git and MLflow fail here; mount it as your own (option `uid=`), or move the project to a local disk",
    ),
    (
        "problem",
        _replace_open_file,
        "a file that is open cannot be replaced",
        "a new result fails while the old one is read; move the project to a local disk",
    ),
    (
        "problem",
        lambda folder: (folder / ("n" * LONG_NAME)).touch(),
        f"a file name of {LONG_NAME} bytes is refused",
        "move the project to a folder that is not encrypted by name, or to another disk",
    ),
    (
        "note",
        lambda folder: (folder / "hard").hardlink_to(folder / "file"),
        "no hard links",
        "files are copied instead, which takes their space twice",
    ),
    (
        "note",
        lambda folder: (folder / "symbolic").symlink_to("file"),
        "no symbolic links",
        "registered versions are evaluated on a copy of the data",
    ),
    (
        "note",
        _sync_folder,
        "folders cannot be flushed to the disk",
        "after a power cut the last files may be missing",
    ),
)


def _find_cache_limits(root: Path) -> Iterator[Limit]:
    """Yield a problem if no type of `cache.type` works between DVC's cache and the project."""
    if not (root / ".dvc").is_dir():
        return
    cache = Path(dvc_setting(root, "cache", "dir") or root / ".dvc" / "cache")
    # DVC prints `reflink,copy`, or `['reflink', 'copy']`.
    kinds = re.findall("[a-z]+", dvc_setting(root, "config", "cache.type") or "reflink,copy")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    reasons = []
    try:
        with (
            tempfile.NamedTemporaryFile(dir=existing, prefix=".vlp-doctor-") as file,
            tempfile.TemporaryDirectory(dir=root, prefix=".vlp-doctor-") as folder,
        ):
            for kind in filter(LINKS.__contains__, kinds):
                try:
                    LINKS[kind](Path(file.name), Path(folder) / kind)
                    return
                except OSError as error:
                    reasons.append(f"{kind}: {_reason(error)}")
    except OSError as error:
        yield "problem", f"DVC's cache cannot be written: {explain_system_error(error)}"
        return
    yield (
        "problem",
        f"no `cache.type` of DVC works between {cache} and {root} ({', '.join(reasons)}): run "
        "`dvc config cache.type reflink,hardlink,copy`, or move the cache to this disk with `dvc cache dir`",
    )


def _clone(source: Path, target: Path) -> None:
    with source.open() as original, target.open("w") as copy:
        fcntl.ioctl(copy, FICLONE, original.fileno())


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "reflink": _clone,
    "hardlink": os.link,
    "symlink": os.symlink,
    "copy": shutil.copyfile,
}


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()
