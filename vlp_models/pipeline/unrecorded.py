"""The result of a stage that has ended, until DVC has recorded it.

Between the end of a stage and the entry in dvc.lock DVC hashes the output, which takes minutes for large ones. Killed
there, it knows nothing of the stage, deletes its output at the next run and starts it again. So a stage that is long
keeps its result beside its resume state, as hard links, which take no room; DVC's next call for the same work gets it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vlp_models.common.io import hash_path, link_or_copy, output_directory, read_json, write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.pipeline.dvc.lock_file import stage_entry
from vlp_models.pipeline.guard import run_by_dvc

FINISHED = "finished"  # in the work directory
RECORD = "finished.json"  # {"files": {path: sha256}, "recorded": what DVC had recorded of the stage before}


def keep(workspace: Workspace, work: Path, stage: str, outputs: Sequence[Path]) -> None:
    """Keeps what `stage` has written, if DVC called it. What the stage's earlier work kept goes."""
    if not run_by_dvc():
        return
    for other in work.parent.glob(f"*/{RECORD}"):
        drop(other.parent)
    directory = work / FINISHED
    shutil.rmtree(directory, ignore_errors=True)
    files = {}
    for output in outputs:
        name = str(output.relative_to(workspace.root))
        files[name] = hash_path(output)
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            shutil.copytree(output, target, copy_function=link_or_copy)
        else:
            link_or_copy(output, target)
    write_json(work / RECORD, {"files": files, "recorded": _recorded(workspace, stage)})


def restore(workspace: Workspace, work: Path, stage: str) -> bool:
    """Puts the kept result back, if DVC has not recorded it since; True if there is nothing left to do."""
    if not run_by_dvc() or not (work / RECORD).exists():
        return False
    try:
        record = read_json(work / RECORD)
        files, recorded = dict(record["files"]), record["recorded"]
    except (DataError, KeyError, TypeError, ValueError):  # after a power cut
        drop(work)
        return False
    kept = {name: work / FINISHED / name for name in files}
    whole = all(path.exists() and hash_path(path) == files[name] for name, path in kept.items())
    if not whole or recorded != _recorded(workspace, stage):
        drop(work)  # damaged, or this run is another one: forced, or after a change of the code
        return False
    for name, path in kept.items():
        if path.is_dir():
            with output_directory(workspace.root / name) as directory:
                shutil.copytree(path, directory, copy_function=link_or_copy, dirs_exist_ok=True)
        else:
            write_text(workspace.root / name, path.read_text(encoding="utf-8"))
    print(f"{stage}: had ended before, only DVC had not recorded it; its result is put back", file=sys.stderr)
    return True


def drop(work: Path) -> None:
    (work / RECORD).unlink(missing_ok=True)
    shutil.rmtree(work / FINISHED, ignore_errors=True)


def _recorded(workspace: Workspace, stage: str) -> str:
    entry = json.dumps(stage_entry(workspace.root, stage), sort_keys=True, default=str)
    return hashlib.sha256(entry.encode()).hexdigest()
