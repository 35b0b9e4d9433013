"""Files that are whole or absent: atomic writes, JSON, content hashes, hard links.

A writer fills a temporary file or folder and renames it at the end, so a reader never gets half of it. Several writers
of one output, on any machines, do not disturb each other: each has its own entry in `.NAME.partial`, next to the output
NAME. A killed process leaves at most this folder behind; the next writer of the output empties it.
"""

from __future__ import annotations

import codecs
import copy
import errno
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import time
import unicodedata
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from vlp_models.errors import DataError, is_disk_full

# `MACHINE-PID-RANDOM`, as `_partial` makes them.
_WRITER = re.compile(r"(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}")  # the name of a partial output
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories of characters that are not shown
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of a call that a file system does not have
LOST_SECONDS = 24 * 3600.0  # a partial output of another machine, unchanged for so long, is left over


@contextmanager
def atomic_write(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file that replaces `path` if the block succeeds, and is removed if it raises.

    Args:
        sync: flush the new file and its folder to disk before and after the rename, to survive a power cut.
    """
    with _partial(path, Path.touch) as temporary, _named_errors(path):
        yield temporary
        # The content first: after a power cut, a rename that reached the disk alone would leave an empty file.
        if sync:
            sync_to_disk(temporary)
        # Atomic, because the temporary file is in the same file system.
        temporary.replace(path)
        # The rename is an entry of the folder, which has to be flushed as well.
        if sync:
            sync_to_disk(path.parent)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Name the file in the error of a full disk, which has none."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error) and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def output_directory(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield an empty temporary directory that replaces `path` if the block succeeds, and is removed if it raises.

    Args:
        keep: all writers make the same content: keep that of the first to finish, which others may be reading.
    """
    with _partial(path, Path.mkdir) as temporary:
        yield temporary
        # Repeated, because another writer may put its output there between the two renames.
        while True:
            if not path.exists():
                try:
                    temporary.rename(path)
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another writer was faster
                        raise
            if keep:
                return
            # No system call replaces a folder that has content, so move the old one out of the way.
            with _partial(path, Path.mkdir) as aside, suppress(FileNotFoundError):  # another writer was faster
                path.rename(aside / path.name)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yield an empty folder for this process within `.NAME.partial`, which is removed in the end.

    Those of processes that were killed are removed as well.
    """
    with _partial(path, Path.mkdir) as temporary:
        yield temporary


@contextmanager
def _partial(path: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Create an entry for this writer in `.NAME.partial`; remove it and those of writers that have ended.

    Args:
        create: creates the entry, a file or a folder.
    """
    folder = path.with_name(f".{path.name}.partial")
    entry = folder / f"{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            create(entry)
            break
        except FileNotFoundError:  # another writer has removed the folder, which was empty
            continue
    try:
        # Entries of writers that were killed are removed here; this process's own counts as written.
        for other in folder.iterdir():
            if not _is_written(other):
                _remove(other)
        yield entry
    finally:
        _remove(entry)
        # Fails while another writer uses the folder, and that one then removes it.
        with suppress(OSError):  # another writer's entry is in it
            folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_written(entry: Path) -> bool:
    """Return whether the writer of a partial output may still be running."""
    import psutil

    writer = _WRITER.fullmatch(entry.name)
    if writer is None:
        return False
    if writer["machine"] == _machine():
        try:
            # A zombie has ended; its parent has not yet read its exit code.
            return psutil.Process(int(writer["pid"])).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
    # Whether a process of another machine runs cannot be determined, so its age decides.
    try:
        # A folder's own time changes only when entries come and go, so its files' times count as well.
        newest = max(path.stat().st_mtime for path in (entry, *entry.rglob("*")))
    except OSError:  # it has just ended
        return True
    return time.time() - newest < LOST_SECONDS


@functools.cache
def _machine() -> str:
    """Return a name for what has process ids of its own: a machine, or a container on it."""
    parts = [socket.gethostname()]
    # Containers of one host may share its name; each has its own pid namespace, such as `pid:[4026531836]`.
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    with suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace `path` atomically with UTF-8 text."""
    with atomic_write(path, sync=sync) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_together(texts: Mapping[Path, str]) -> None:
    """Replace several files with UTF-8 text, all or none. Keeps symbolic links, permissions and CRLF line ends.

    texts: with line ends of either kind; a file has those of its first line before, a new one LF.
    """
    # 1. Write all new contents next to their targets, where a full disk or missing rights show.
    # Resolved, so that the file behind a symbolic link is replaced, not the link.
    targets = {path.resolve(): text for path, text in texts.items()}
    before = {path: path.read_bytes() if path.exists() else None for path in targets}
    replaced: list[Path] = []
    with ExitStack() as stack:
        # Private until it has the mode of the file: it may contain a secret.
        private = functools.partial(Path.touch, mode=0o600)
        partials = {p: stack.enter_context(_partial(p, private if p.exists() else Path.touch)) for p in targets}
        for path, text in targets.items():
            # The first line decides which line ends the file has.
            crlf = (before[path] or b"").partition(b"\n")[0].endswith(b"\r")
            with _named_errors(path):
                lines = text.replace("\r\n", "\n")
                partials[path].write_text(lines, encoding="utf-8", newline="\r\n" if crlf else "\n")
            if path.exists():
                with suppress(OSError):  # a file system without permissions
                    shutil.copymode(path, partials[path])
        # 2. Rename them. If one fails, put the old contents of the others back.
        try:
            for path, partial in partials.items():
                partial.replace(path)
                replaced.append(path)
        except OSError:
            # Written in place, because a rename has just failed.
            for path in replaced:
                content = before[path]
                if content is None:
                    path.unlink()
                else:
                    path.write_bytes(content)
            raise


def is_same_text(path: Path, text: str) -> bool:
    """Return whether a file has this UTF-8 text, with line ends of either kind (`write_together` keeps them)."""
    return path.read_bytes().replace(b"\r\n", b"\n") == text.encode()


def to_json(value: Any) -> str:
    """Return indented JSON; equal values give equal text."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically with indented JSON; equal values give equal bytes."""
    write_text(path, to_json(value))


def read_json(path: Path) -> Any:
    """Read a JSON file that a stage wrote.

    Raises:
        DataError: the file is missing, or is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; run `dvc repro`") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None


def read_json_or_none(path: Path) -> Any:
    """Return a file's JSON, or None if it is missing or damaged, for what is only a hint or a cache."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def is_line(value: Any) -> bool:
    """Return whether a value is a text of one line, without characters that control a terminal or hide text."""
    return isinstance(value, str) and not any(unicodedata.category(character) in _UNSEEN for character in value)


def read_zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return the content of a zip archive's member, without unpacking more than the size that it declares.

    Raises:
        ValueError: it is compressed by other methods, which zipfile unpacks without a limit, or is of another size.
        zipfile.BadZipFile: its checksum differs.
    """
    # Of the compressed kinds, zipfile limits how much it unpacks at once for deflate only.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is neither stored nor deflated (compression {member.compress_type})")
    one_more = copy.copy(member)  # zipfile cuts longer content to the declared size, so ask for a byte more
    one_more.file_size += 1
    with archive.open(one_more) as file:
        content = file.read(one_more.file_size)
    if len(content) != member.file_size:
        raise ValueError(f"{member.filename} does not have the {member.file_size:,} bytes that it declares")
    return content


HEAD = 4096  # bytes that `explain_not_text` needs
_COMPRESSED = {
    b"\x1f\x8b": "compressed with gzip",
    b"\xfd7zXZ\0": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PK\x03\x04": "a zip archive or a spreadsheet",
}
_STAND_INS = {  # how files begin that are in the place of another one, in lower case
    b"version https://git-lfs": "a Git LFS pointer instead of the file; run `git lfs pull` in its folder",
    b"/annex/objects/": "a git-annex pointer instead of the file; run `git annex get` in its folder",
    b"<!doctype html": "an HTML page instead of the file, such as a server's error or login page; get the file again",
    b"<html": "an HTML page instead of the file, such as a server's error or login page; get the file again",
    b"\0\5\x16\7": "metadata of macOS (a `._` file) instead of the file; delete it, and get the file itself",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f"))


def convert_command(name: str, encoding: str = "cp1252") -> str:
    """Return the command that converts a text file to UTF-8, in backticks.

    encoding: that of Windows in Western languages by default, which has all of Latin 1's letters.
    """
    folder, slash, file = name.rpartition("/")
    old, new = shlex.quote(name), shlex.quote(f"{folder}{slash}utf8-{file}")
    return f"`iconv -f {encoding} -t utf-8 {old} > {new}`"


def explain_stand_in(head: bytes) -> str:
    """Return what is in the place of a file with these first bytes, and the way out; empty if it may be the file."""
    start = head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n").lower()
    return next((reason for mark, reason in _STAND_INS.items() if start.startswith(mark)), "")


def explain_not_text(head: bytes, name: str) -> str:
    """Return why the file `name`, with these first bytes, is not UTF-8 text, and the way out; empty if it may be text.

    A few control characters are left to the reader, which reports their lines.
    """
    if reason := explain_stand_in(head):
        return reason
    for mark, kind in _COMPRESSED.items():
        if head.startswith(mark):
            return f"{kind}, not text; unpack it, or save it as text"
    # `BZh`, a digit for the block size, then the first digits of pi in BCD, which start a block.
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "compressed with bzip2, not text; unpack it, or save it as text"
    # Every second byte of UTF-16 is zero in most texts: the shares of zeros at even and odd places differ.
    zeros = [half.count(0) / max(1, len(half)) for half in (head[::2], head[1::2])]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(head) >= 8 and min(zeros) < 0.1 and max(zeros) > 0.4):
        return f"UTF-16 text; save it as UTF-8: {convert_command(name, 'utf-16')}"
    if len(head) >= 8 and not head.strip(b"\0"):
        return "nothing but zeros, as an interrupted download leaves it; get the file again"
    # A file is binary only if at least 8 bytes and 3% of them are control characters.
    control = len(head) - len(head.translate(None, _CONTROL))
    if control < 8 or control < len(head) / 33:
        return ""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return "a binary file, not text"
    return ""


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stat_file(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change whenever a file is written or replaced, without reading it.

    A date can be set back (`touch -d`, `cp -p`, rsync) and a size can be equal, but the kernel sets the change time.
    They also change if only permissions or links do, so they say that a file is the same, never that it differs.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_path(path: Path) -> str:
    """Return the sha256 of a file, or of the names and contents of a directory's files."""
    if path.is_file():
        return hash_file(path)
    digest = hashlib.sha256()
    # Sorted: the order of a folder's entries depends on the file system.
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path)}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


# File systems where a hard link is lost for machines that have read its file by a name that is deleted later.
_COPIED = {"fuse.seaweedfs"}


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link `source` to `target`; copy where links do not work (another file system, a mounted bucket).

    Of a symbolic link, as DVC's `cache.type symlink` makes them, its file.
    """
    source = os.path.realpath(source)
    if _file_system(Path(source).stat().st_dev) not in _COPIED:
        with suppress(OSError):
            os.link(source, target)
            return
    # The content alone: not every file system has permissions, and a protected file of DVC's would stay read-only.
    shutil.copyfile(source, target)


def symlink_or_copy(source: Path, target: Path) -> None:
    """Make `target` a symbolic link to a file or folder; copy it where the file system has no symbolic links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source.absolute())  # a relative one would be looked up from the link's folder
    except OSError as error:
        if error.errno not in (errno.EPERM, *UNSUPPORTED):
            raise
        if source.is_dir():
            shutil.copytree(source, target, copy_function=link_or_copy)
        elif source.exists():  # else it is missing there as well
            link_or_copy(source, target)


@functools.cache
def _file_system(device: int) -> str:
    """Return the type of the file system with this device number, such as ext4; empty if it cannot be determined."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        # A line is `ID PARENT MAJOR:MINOR ROOT MOUNT OPTIONS ... - TYPE SOURCE OPTIONS`.
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0]
    return ""


def sync_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk, if the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # network file systems and buckets, most of them for folders only
            raise
    finally:
        os.close(descriptor)
