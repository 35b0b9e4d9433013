"""Delete the files of old registered versions. The version itself stays, with its scores, lineage and card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.params import Params
from vlp_models.registry.client import find_model, model_name
from vlp_models.registry.promotion.ledger import Ledger, replay
from vlp_models.registry.receipts import read_registered
from vlp_models.tasks import TASKS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import FileInfo
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

PRUNED = "pruned"  # tag of a version whose files were deleted, or are being deleted: the date


@dataclass(frozen=True)
class Versions:
    """The versions of all tasks: those that keep their files, and those that lose them."""

    needed: list[ModelVersion]
    old: list[ModelVersion]


def sort_versions(client: MlflowClient, params: Params, root: Path, newest: int) -> Versions:
    """
    Args:
        newest: how many versions of each task keep their files; 0: all.

    Raises:
        LedgerError: the ledger was changed.
    """
    states = replay(Ledger(root / params.promotion.ledger).entries())
    receipts = read_registered(root / "reports")
    sorted_versions = Versions([], [])
    for task in TASKS:
        name = model_name(params.tracking, task)
        model = find_model(client, name)
        if model is None:
            continue
        versions = sorted(client.search_model_versions(f"name='{name}'"), key=lambda v: -int(v.version))
        # A rollback goes from champion to champion; a registered version without files would be registered again.
        champions = {champion.content for champion in states[name].champions} if name in states else set()
        in_use = {str(number) for number in dict(model.aliases).values()}
        in_use |= {str(receipt["version"]) for receipt in receipts.get(task, []) if "version" in receipt}
        for rank, version in enumerate(versions):
            is_kept = not newest or rank < newest or str(version.version) in in_use
            is_kept = is_kept or version.tags.get("content") in champions
            (sorted_versions.needed if is_kept else sorted_versions.old).append(version)
    return sorted_versions


def measure_files(client: MlflowClient, version: ModelVersion) -> tuple[int, int]:
    """Return how many files and folders a version has, and the bytes of its files; zeros if they were deleted."""
    from mlflow.exceptions import MlflowException

    repository = _files_of(client, version)

    def entries(path: str | None) -> Iterator[FileInfo]:
        for entry in repository.list_artifacts(path):
            yield entry
            if entry.is_dir:
                yield from entries(entry.path)

    try:
        listed = list(entries(None))
    except (MlflowException, OSError):  # deleted before
        return 0, 0
    return len(listed), sum(entry.file_size or 0 for entry in listed if not entry.is_dir)


def _files_of(client: MlflowClient, version: ModelVersion) -> ArtifactRepository:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(client.get_model_version_download_uri(version.name, str(version.version)))


def delete_files(client: MlflowClient, version: ModelVersion) -> None:
    """Delete a version's files, and tag it first: if this is interrupted, the next call deletes the rest."""
    client.set_model_version_tag(version.name, str(version.version), PRUNED, time.strftime("%Y-%m-%d"))
    _files_of(client, version).delete_artifacts()
