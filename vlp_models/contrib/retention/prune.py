"""Apply the section `retention`: list what goes and what it frees, then delete it.

Each kind is deleted on its own, and what is needed is never touched, so an interruption leaves the rest for the next
call. Old versions go first: their data is kept in DVC's cache only while they have their files.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace, run_git
from vlp_models.contrib.retention.data import collect_garbage, write_project
from vlp_models.contrib.retention.params import RetentionParams
from vlp_models.contrib.retention.versions import PRUNED, Versions, delete_files, measure_files, sort_versions
from vlp_models.params import Params
from vlp_models.registry.client import connect, database_exists, mlflow_errors, tracking_uri
from vlp_models.registry.evaluations import read_lineage_file

if TYPE_CHECKING:
    from mlflow import MlflowClient


LONG_LOG, KEPT_LOG = 16 * 2**20, 2**20  # bytes


@dataclass(frozen=True)
class Pruned:
    """What was deleted of one kind, or would be."""

    what: str
    count: int
    bytes: int


def prune(params: Params, workspace: Workspace, *, dry: bool) -> Iterator[Pruned]:
    """Delete what the section `retention` does not keep, kind by kind.

    Args:
        dry: delete nothing.

    Raises:
        TrackingError: MLflow does not answer. DataError: the ledger was changed, or DVC failed.
    """
    retention, root = params.section(RetentionParams), workspace.root
    versions, locks = Versions([], []), []
    if params.tracking.uri and database_exists(tracking_uri(params.tracking, root)):
        with mlflow_errors(params):
            client = connect(params.tracking, root)
            versions = sort_versions(client, params, root, retention.versions)
            if retention.versions:
                yield _prune_versions(client, versions, dry=dry)
            for version in versions.kept:
                if (text := read_lineage_file(client, version, "dvc.lock")) is not None:
                    locks.append(text)
    if retention.commits and run_git(root, "rev-parse", "HEAD") is not None:
        with tempfile.TemporaryDirectory() as folder:
            write_project(Path(folder), locks, root)
            count, size = collect_garbage(root, retention.commits, Path(folder), remote=retention.remote, dry=dry)
        yield Pruned("files in DVC's cache", count, size)
    if retention.days:
        limit = time.time() - 86400 * retention.days
        # The images are in data/accepted.
        yield _delete_old("ingested submissions", (root / "data" / "inbox" / "done").glob("*/"), limit, dry)
        runs = {f"pretrain-{name}" for name in params.pretrain} | {f"finetune-{name}" for name in params.finetune}
        states = [folder for kind in ("pretrain", "finetune") for folder in (root / ".work").glob(f"{kind}-*/")]
        yield _delete_old("states of removed runs", (f for f in states if f.name not in runs), limit, dry)
    yield _shorten_logs(root, dry=dry)


def _prune_versions(client: MlflowClient, versions: Versions, *, dry: bool) -> Pruned:
    measured = [(version, measure_files(client, version)) for version in versions.old]
    # Of a version that is tagged and empty nothing is left to delete.
    doomed = [(version, size) for version, size in measured if size or PRUNED not in version.tags]
    for version, _ in () if dry else doomed:
        delete_files(client, version)
    return Pruned("registered versions", len(doomed), sum(size for _, size in doomed))


def _delete_old(what: str, folders: Iterable[Path], limit: float, dry: bool) -> Pruned:
    """Delete the folders that were made, or moved to their place, before a time."""
    old = [folder for folder in folders if folder.stat().st_ctime < limit]
    size = sum(file.lstat().st_size for folder in old for file in folder.rglob("*") if not file.is_dir())
    for folder in () if dry else old:
        shutil.rmtree(folder)
    return Pruned(what, len(old), size)


def _shorten_logs(root: Path, *, dry: bool) -> Pruned:
    """Leave the last part of long logs of `vlp up`. Its processes append to them, so they go on at the new end."""
    logs = [log for log in (root / ".work" / "stack").glob("*.log") if log.stat().st_size > LONG_LOG]
    size = sum(log.stat().st_size - KEPT_LOG for log in logs)
    for log in () if dry else logs:
        with log.open("r+b") as file:
            file.seek(-KEPT_LOG, 2)
            rest = file.read()
            file.seek(0)
            file.write(rest)
            file.truncate()
    return Pruned("logs", len(logs), size)
