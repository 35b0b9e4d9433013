"""Keep the result of a finished stage until DVC has recorded it.

Between the end of a stage and the entry in dvc.lock, DVC hashes the output, which takes minutes for large ones. If DVC
is killed there, or refuses the stage because params.yaml was edited, it has no record: at the next run it deletes the
output and starts the stage again. So a long stage saves its result in its work directory, as hard links, which take no
space. The name of this directory is a hash of the params and inputs, so a run that finds a result there restores it.

A finished stage also deletes what runs with other inputs that ended weeks ago have left.
"""

from __future__ import annotations

import functools
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vlp_models.common.device import is_main_process
from vlp_models.common.io import hash_path, link_or_copy, output_directory, read_json, write_json, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.pipeline.guard import recorded_by_dvc

logger = get_logger(__name__)

FINISHED = "finished"  # in the work directory
KEPT_DAYS = 14  # since the last change of another run's work
RECORD = "finished.json"  # {"files": {path: sha256}, "code": hash of the stage's code}
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")  # name of a work directory (Workspace.work)


def save_unrecorded_result(workspace: Workspace, work: Path, stage: str, outputs: Sequence[Path]) -> None:
    """Save the outputs of `stage` in `work`, if DVC records them."""
    if not recorded_by_dvc():
        return
    # The record comes last: without it, a run finds no result.
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
    write_json(work / RECORD, {"files": files, "code": hash_code(stage)})


def restore_unrecorded_result(workspace: Workspace, work: Path, stage: str) -> bool:
    """Restore the outputs saved in `work`, if the stage's code is the same; return whether they were restored.

    Every process of a training may call this: rank 0 writes, the others return the same.
    """
    if not recorded_by_dvc():
        return False
    code_now = hash_code(stage)
    if not (work / RECORD).exists():
        if is_main_process() and any(work.parent.glob(f"*/{RECORD}")):
            logger.info("%s: %s has results of other params or inputs, none of these", stage, work.parent)
        return False
    try:
        record = read_json(work / RECORD)
        files, code = dict(record["files"]), record["code"]
    except (DataError, KeyError, TypeError, ValueError):  # after a power cut
        files, code = {}, ""
    saved = {name: work / FINISHED / name for name in files}
    # hashed again: a link shares its content with a file that may have been changed since
    intact = all(path.exists() and hash_path(path) == files[name] for name, path in saved.items())
    if not intact or code != code_now:
        if is_main_process():
            reason = "made by other code" if intact and code else "damaged"
            logger.info("%s: not used, %s: the result in %s", stage, reason, work)
        return False
    if not is_main_process():
        return True
    for name, path in saved.items():
        if path.is_dir():
            with output_directory(workspace.root / name) as directory:
                shutil.copytree(path, directory, copy_function=link_or_copy, dirs_exist_ok=True)
        else:
            write_text(workspace.root / name, path.read_text(encoding="utf-8"))
    logger.info("%s: restored the result of a finished run with the same params, inputs and code", stage)
    return True


def remove_chunks(work: Path) -> None:
    """Delete the finished chunks of a published result, parts of chunks that lost workers left, and outdated work."""
    for path in work.iterdir():
        if path.name in (FINISHED, RECORD):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    remove_outdated_work(work)
    with suppress(OSError):  # not empty while it keeps the result for DVC
        work.rmdir()


def remove_outdated_work(work: Path) -> None:
    """Delete the work directories of other inputs next to `work`, whose result is published, after `KEPT_DAYS`.

    Until then, undoing a change of params resumes the run that it interrupted, or restores its result.
    """
    for other in sorted(work.parent.iterdir()):
        if other == work or not _FINGERPRINT.fullmatch(other.name):
            continue
        try:
            # A folder's own time does not change when files below it are written.
            newest = max((path.lstat().st_mtime for path in other.rglob("*")), default=other.stat().st_mtime)
        except OSError:  # another process is changing it
            continue
        if newest < time.time() - KEPT_DAYS * 86_400:
            shutil.rmtree(other, ignore_errors=True)


@functools.cache
def hash_code(stage: str) -> str:
    """Return the hash of the code that this process has loaded: of the first call, since files may be edited later."""
    return code_hash([f"vlp_models.pipeline.stages.{stage.partition('@')[0]}"])
