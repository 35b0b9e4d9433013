"""SHA256SUMS: the sha256 of every file of a directory, in the format of `sha256sum --check`."""

from __future__ import annotations

from pathlib import Path

from vlp_models.common.io import hash_file, sync_to_disk
from vlp_models.errors import CheckpointError, explain_system_error

SUMS = "SHA256SUMS"


def write_sums(directory: Path) -> None:
    """Write the sha256 of every file of the directory to SHA256SUMS, and flush the files to disk."""
    lines = []
    for path in sorted(p for p in directory.iterdir() if p.is_file() and p.name != SUMS):
        lines.append(f"{hash_file(path)}  {path.name}\n")
        # On disk before its sum is written, so that a power failure leaves no sum of a truncated file.
        sync_to_disk(path)
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def find_damaged(directory: Path) -> dict[Path, str]:
    """Return the files that differ from the directory's SHA256SUMS, with a reason; nothing if it has none."""
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        return {directory / SUMS: f"{directory / SUMS}: damaged"}
    damaged = {}
    for line in lines:
        # `<sha256>  <file>`; a name with a folder in it would lead out of the directory.
        written, _, name = line.partition("  ")
        path = directory / name
        if len(written) != 64 or path.name != name:
            return {directory / SUMS: f"{directory / SUMS}: damaged"}
        try:
            if hash_file(path) != written:
                damaged[path] = f"{path}: damaged: its sha256 differs from the one in {SUMS}"
        except OSError as error:
            damaged[path] = f"{explain_system_error(error)} (or {SUMS} is damaged)"
    return damaged


def verify(directory: Path) -> None:
    """Check the files of a directory against its SHA256SUMS, if it has one.

    Raises:
        CheckpointError: names the damaged file.
    """
    for reason in find_damaged(directory).values():
        # Removed first, because DVC keeps a file whose size and time are unchanged.
        way_out = f"`rm -r {directory}` and `dvc checkout {directory}` may restore it; otherwise copy or train it again"
        raise CheckpointError(f"{reason}; {way_out}")
