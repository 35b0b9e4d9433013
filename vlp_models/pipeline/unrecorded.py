"""Save the result of a finished stage until DVC has recorded it.

Between the end of a stage and the entry in dvc.lock, DVC hashes the output, which takes minutes for large ones. If DVC
is killed there, it has no record of the stage: at the next run it deletes the output and starts the stage again. So a
long stage saves its result in its work directory, as hard links, which take no space; the next run of the same work
restores it.

A finished stage also deletes what runs with other inputs that were interrupted weeks ago have left.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from vlp_models.common.device import is_main_process
from vlp_models.common.io import hash_path, link_or_copy, output_directory, read_json, write_json, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.pipeline.dvc.lock_file import stage_entry
from vlp_models.pipeline.guard import recorded_by_dvc

logger = get_logger(__name__)

FINISHED = "finished"  # in the work directory
KEPT_DAYS = 14  # since the last change of an interrupted run's work
RECORD = "finished.json"  # {"files": {path: sha256}, "recorded": hash of dvc.lock's entry before the stage ran}
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")  # name of a work directory (Workspace.work)


def save_unrecorded_result(workspace: Workspace, work: Path, stage: str, outputs: Sequence[Path]) -> None:
    """Save the outputs of `stage` in `work`, if DVC records them; delete what earlier runs of the stage saved."""
    if not recorded_by_dvc():
        return
    for other in work.parent.glob(f"*/{RECORD}"):
        _delete_saved(other.parent)
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
    write_json(work / RECORD, {"files": files, "recorded": _hash_entry(workspace, stage)})


def restore_unrecorded_result(workspace: Workspace, work: Path, stage: str) -> bool:
    """Restore the saved outputs, if DVC has not recorded them; return whether they were restored.

    Every process of a training may call this: rank 0 writes, the others return the same.
    """
    if not recorded_by_dvc() or not (work / RECORD).exists():
        return False
    try:
        record = read_json(work / RECORD)
        files, recorded = dict(record["files"]), record["recorded"]
    except (DataError, KeyError, TypeError, ValueError):  # after a power cut
        _delete_saved(work)
        return False
    kept = {name: work / FINISHED / name for name in files}
    intact = all(path.exists() and hash_path(path) == files[name] for name, path in kept.items())
    if not intact or recorded != _hash_entry(workspace, stage):
        _delete_saved(work)  # damaged, or recorded meanwhile: this run is a forced one, or the code has changed
        return False
    if not is_main_process():
        return True
    for name, path in kept.items():
        if path.is_dir():
            with output_directory(workspace.root / name) as directory:
                shutil.copytree(path, directory, copy_function=link_or_copy, dirs_exist_ok=True)
        else:
            write_text(workspace.root / name, path.read_text(encoding="utf-8"))
    logger.info("%s: restored the result of a finished run that DVC had not recorded", stage)
    return True


def remove_outdated_work(work: Path) -> None:
    """Delete the work directories of other inputs next to `work`, whose result is published, after `KEPT_DAYS`.

    Until then, undoing a change of params resumes the run that it interrupted. Those with a result that DVC has not
    recorded are kept.
    """
    for other in sorted(work.parent.iterdir()):
        if other == work or not _FINGERPRINT.fullmatch(other.name) or (other / RECORD).exists():
            continue
        try:
            newest = max((path.lstat().st_mtime for path in other.rglob("*")), default=other.stat().st_mtime)
        except OSError:  # another process is changing it
            continue
        if newest < time.time() - KEPT_DAYS * 86_400:
            shutil.rmtree(other, ignore_errors=True)


def _delete_saved(work: Path) -> None:
    """Delete the result saved in `work`."""
    (work / RECORD).unlink(missing_ok=True)
    shutil.rmtree(work / FINISHED, ignore_errors=True)


def _hash_entry(workspace: Workspace, stage: str) -> str:
    entry = json.dumps(stage_entry(workspace.root, stage), sort_keys=True, default=str)
    return hashlib.sha256(entry.encode()).hexdigest()
