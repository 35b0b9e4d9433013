"""Apply the section `retention`: list what goes and what it frees, then delete it.

Each kind is deleted on its own, and what is needed is never touched, so an interruption leaves the rest for the next
call. Old versions go first: their data is kept in DVC's cache only while they have their files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace, dvc_setting, run_git
from vlp_models.contrib.retention.data import collect_garbage, read_commits, read_lock, require_whole, write_project
from vlp_models.contrib.retention.params import RetentionParams
from vlp_models.contrib.retention.versions import PRUNED, Versions, delete_files, measure_files, sort_versions
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.client import connect, database_exists, mlflow_errors, tracking_uri
from vlp_models.registry.evaluations import read_lineage_file
from vlp_models.registry.promotion.ledger import Ledger, replay

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


LONG_LOG, KEPT_LOG = 16 * 2**20, 2**20  # bytes


@dataclass(frozen=True)
class Pruned:
    """What was deleted of one kind, or would be. names: empty for files in DVC's cache."""

    kind: str
    count: int
    bytes: int
    names: Sequence[str] = ()


def prune(params: Params, workspace: Workspace, *, dry: bool) -> Iterator[Pruned]:
    """Delete what the section `retention` does not keep, kind by kind.

    Args:
        dry: delete nothing.

    Raises:
        TrackingError: MLflow does not answer. DataError: the ledger was changed, it is not known what a version needs,
            DVC failed, or it has no remote to delete from.
    """
    retention, root = params.section(RetentionParams), workspace.root
    if retention.commits and retention.remote and not dvc_setting(root, "config", "core.remote"):
        way_out = "`dvc remote add --default NAME URL`, or set retention.remote: false"
        raise DataError(f"retention.remote: true, but DVC has no default remote; {way_out}")
    versions, locks = Versions([], []), []
    if params.tracking.uri and database_exists(tracking_uri(params.tracking, root)):
        with mlflow_errors(params):
            client = connect(params.tracking, root)
            versions = sort_versions(client, params, root, retention.versions)
            if retention.versions:
                yield _prune_versions(client, versions, dry=dry)
            locks = [_read_lock(client, version) for version in versions.needed] if retention.commits else []
    elif any(state.champions for state in replay(Ledger(root / params.promotion.ledger).entries()).values()):
        raise DataError(f"{params.tracking.uri}: no registry, but the ledger has champions, whose data must be kept")
    if retention.commits and run_git(root, "rev-parse", "HEAD") is not None:
        with tempfile.TemporaryDirectory() as folder:
            needed = [*map(read_lock, sorted(set(locks))), *read_commits(root, retention.commits)]
            write_project(Path(folder), needed, root)
            if retention.remote:
                require_whole(root, needed)
            count, size = collect_garbage(root, Path(folder), remote=retention.remote, dry=dry)
        yield Pruned("files in DVC's cache", count, size)
    if retention.days:
        limit = time.time() - 86400 * retention.days
        if params.ingest.inbox:
            done = root / params.ingest.inbox / "done"
            yield _delete_old("ingested submissions", done.iterdir() if done.is_dir() else (), limit, dry)
        runs = {f"pretrain-{name}" for name in params.pretrain} | {f"finetune-{name}" for name in params.finetune}
        states = [folder for kind in ("pretrain", "finetune") for folder in (root / ".work").glob(f"{kind}-*/")]
        yield _delete_old("states of removed runs", (f for f in states if f.name not in runs), limit, dry)
    yield _shorten_logs(root, dry=dry)


def _read_lock(client: MlflowClient, version: ModelVersion) -> str:
    """Return the dvc.lock that is kept with a version.

    Raises:
        DataError: it is missing.
    """
    text = read_lineage_file(client, version, "dvc.lock")
    if text is None:
        name = f"{version.name} version {version.version}"
        raise DataError(f"{name}: no dvc.lock is kept with it, so its data is not known; set retention.commits: 0")
    return text


def _prune_versions(client: MlflowClient, versions: Versions, *, dry: bool) -> Pruned:
    names, total = [], 0
    for version in versions.old:
        entries, size = measure_files(client, version)
        if entries or PRUNED not in version.tags:
            names.append(f"{version.name}/{version.version}")
            total += size
            if not dry:
                delete_files(client, version)
    return Pruned("registered versions", len(names), total, names)


def _delete_old(kind: str, paths: Iterable[Path], limit: float, dry: bool) -> Pruned:
    """Delete the files and folders that were made, or moved to their place, before a time."""
    old = [path for path in paths if path.lstat().st_ctime < limit]
    files = [file for path in old for file in (path, *path.rglob("*")) if not file.is_dir()]
    size = sum(file.lstat().st_size for file in files)
    if not dry:
        for path in old:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Pruned(kind, len(old), size, sorted(path.name for path in old))


def _shorten_logs(root: Path, *, dry: bool) -> Pruned:
    """Leave the last part of long logs of `vlp up`. Its processes append to them, so they go on at the new end."""
    logs = [log for log in (root / ".work" / "stack").glob("*.log") if log.stat().st_size > LONG_LOG]
    size = sum(log.stat().st_size - KEPT_LOG for log in logs)
    if not dry:
        for log in logs:
            with log.open("r+b") as file:
                file.seek(-KEPT_LOG, os.SEEK_END)
                rest = file.read()
                file.seek(0)
                file.write(rest)
                file.truncate()
    return Pruned("logs", len(logs), size, sorted(log.name for log in logs))
