"""Files inside tars, and errors of damaged files."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pyarrow as pa

from vlp_models.common.io import HEAD, explain_stand_in
from vlp_models.errors import DataError, first_line


class _Tar(tarfile.TarFile):
    """A tar whose damaged headers all raise `ReadError`: tarfile raises anything, or reads in circles."""

    def next(self) -> tarfile.TarInfo | None:
        start = self.offset
        try:
            info = super().next()
        except (ValueError, IndexError, ArithmeticError, MemoryError, RecursionError):
            raise tarfile.ReadError(f"invalid header at byte {start:,}") from None
        if info is not None and (info.size < 0 or self.offset < info.offset_data):
            raise tarfile.ReadError(f"invalid size in the header at byte {info.offset:,}")
        return info


def members(path: Path) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key, suffix and header of a tar's files, in order.

    Nothing is written under a member's name. A tar with links, devices or paths that lead out of it is refused as a
    whole: it is an attack, or not a dataset.
    """
    # `r:` refuses compressed tars: their size is unknown before they are unpacked.
    with readable(path, "a tar file"), _Tar.open(path, "r:") as archive:
        for info in archive:
            name = PurePosixPath(info.name)
            if info.isdir():
                continue
            if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.issparse():
                raise DataError(f"{path}: {info.name!r:.80} is a link or a special file; only plain files are read")
            if name.is_absolute() or ".." in name.parts or "\0" in info.name:
                raise DataError(f"{path}: the path {info.name!r:.80} leads out of the tar")
            # webdataset's rule: the key ends at the first dot of the name
            base, _, suffix = name.name.partition(".")
            # a hidden file, such as .DS_Store
            if base:
                yield str(name.parent / base), suffix.lower(), info
            archive.members.clear()  # type: ignore[attr-defined]  # it grows with the files
        with path.open("rb") as file:  # tarfile takes a damaged header for the end
            file.seek(archive.offset)
            end = file.read(tarfile.BLOCKSIZE)
        if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
            raise DataError(f"{path}: damaged or truncated after {archive.offset:,} bytes; {_get_again(path)}")


def _get_again(path: Path) -> str:
    """Return the way out for a damaged file; img2dataset writes statistics when it has finished a shard."""
    stats = f"{path.stem}_stats.json"
    if not (path.parent / stats).exists() and any(path.parent.glob("*_stats.json")):
        return f"img2dataset has not finished it (no {stats}): run img2dataset again, or delete this file"
    return "get it again"


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turn errors of a damaged file into a `DataError`.

    Args:
        kind: what the file should be, for messages.
    """
    with path.open("rb") as file:
        if reason := explain_stand_in(file.read(HEAD)):
            raise DataError(f"{path}: {reason}")
    try:
        yield
    except (pa.ArrowException, tarfile.TarError, EOFError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not pyarrow's
            raise
        raise DataError(f"{path}: not {kind}, or damaged ({first_line(error)}); {_get_again(path)}") from None
