"""Whether what `prepare` reads is what it was when the stage began: DVC hashes it when the stage has ended.

A picture withdrawn meanwhile (`vlp forget`), or a batch taken in (`vlp ingest`), would be recorded as seen.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.workspace.paths import Workspace

Seen = dict[Path, tuple[int, int]]  # a file or folder -> when it changed, in ns, and its size


def what_is_there(params: Params, workspace: Workspace, stage: str, key: str) -> Seen:
    """The list of withdrawn pictures, and what lies directly in the dataset's folder; of another stage nothing."""
    if stage != "prepare" or key not in params.data:
        return {}
    root = workspace.root / params.data[key].root
    entries = [path for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
    return {path: _of(path) for path in (workspace.withdrawn, *entries) if path.exists()}


def check_unchanged(before: Seen, after: Seen, stage: str, key: str) -> None:
    """
    Raises:
        DataError: names what came, went or was written.
    """
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise DataError(
            f"{changed[0]}: was changed while {stage} {key} ran, which may have read what was there before; its result "
            "is not recorded. Run the same command again"
        )


def _of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
