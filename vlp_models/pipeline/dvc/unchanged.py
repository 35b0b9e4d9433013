"""Whether what `prepare` reads is what it was when the stage began: DVC hashes it when the stage has ended.

A picture withdrawn meanwhile (`vlp forget`), or a batch taken in (`vlp ingest`), would be recorded as seen.

Not seen are files of a sub-folder that are rewritten in place, and what changes between this look and DVC's.
"""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.pipeline.dvc.external import read_of_others

Seen = dict[Path, int]  # a number that is another one when the file, or what lies directly in the folder, is


def what_is_there(params: Params, workspace: Workspace, stage: str, key: str) -> Seen:
    """The list of withdrawn pictures, the dataset's folder, and files it names elsewhere; of another stage nothing."""
    if stage != "prepare" or key not in params.data:
        return {}
    found: Seen = {}
    root = workspace.root / params.data[key].root
    for file in (workspace.withdrawn, *(workspace.root / path for path in read_of_others(params.data[key]))):
        if file.exists():
            found[file] = _of(file.stat())
    if root.is_dir():
        with os.scandir(root) as entries:  # of a million pictures, it may be: none of them is kept
            seen = (e for e in entries if not e.name.startswith("."))
            found[root] = sum(hash((e.name, _of(e.stat(follow_symlinks=False)))) for e in seen)
    return found


def check_unchanged(before: Seen, after: Seen, stage: str, key: str) -> None:
    """
    Raises:
        DataError: names the file or folder that is not what it was.
    """
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise DataError(
            f"{changed[0]}: was changed while {stage} {key} ran, which may have read what was there before; its result "
            "is not recorded. Run the same command again"
        )


def _of(status: os.stat_result) -> int:
    return hash((status.st_mtime_ns, status.st_size))
