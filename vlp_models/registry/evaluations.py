"""What is kept with a registered version besides its weights: scores per item and lineage.

Both are artifacts of the run that registered it: `evaluations/<test>/` (items.parquet, scores.json), one folder for
each test it was evaluated on, and `lineage/` (lineage.json, params.yaml, dvc.lock).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.redaction import redact, redact_yaml, redacted
from vlp_models.errors import DataError
from vlp_models.metrics.score import ItemScores
from vlp_models.tasks.scoring import read_item_scores

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

EVALUATIONS, LINEAGE = "evaluations", "lineage"
ITEMS, SCORES, RECORD = "items.parquet", "scores.json", "lineage.json"
YAML = (".yaml", ".yml", "dvc.lock")
LINEAGE_HASH = "lineage"  # tag of a version: sha256 of its lineage.json
CURRENT_EVALUATION = "evaluation"  # tag of a version: folder of its latest evaluation


def get_run_id(version: ModelVersion) -> str:
    """Return the id of the run that registered the version.

    Raises:
        DataError: it has none.
    """
    if not version.run_id:
        raise DataError(f"{version.name} version {version.version}: no MLflow run; another program registered it")
    return version.run_id


def log_evaluation(client: MlflowClient, run_id: str, directory: Path) -> str:
    """Keep the scores of `directory` (reports/eval/RUN) with the run; return the folder's name.

    The name is a hash of the test items and of how they were scored.

    Raises:
        DataError: `directory` has no readable scores per item.
    """
    # Scores of the same items by the same scorers replace each other; all others have a folder of their own.
    items = read_item_scores(directory / ITEMS)
    identity = sorted({(s.dataset, s.split, s.test, s.metric, s.note) for s in items})
    folder = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    for name in (ITEMS, SCORES):
        client.log_artifact(run_id, str(directory / name), f"{EVALUATIONS}/{folder}")
    return folder


def read_evaluations(client: MlflowClient, version: ModelVersion) -> list[list[ItemScores]]:
    """Return the version's evaluations, the current one first.

    Raises:
        DataError: one is not readable.
    """
    folders = [Path(f.path).name for f in client.list_artifacts(get_run_id(version), EVALUATIONS) if f.is_dir]
    # False sorts before True: the current folder first, the others in their order.
    folders.sort(key=lambda folder: folder != version.tags.get(CURRENT_EVALUATION))
    return [_read_items(client, version, folder) for folder in folders]


def read_latest_evaluation(client: MlflowClient, version: ModelVersion) -> list[ItemScores]:
    """Return the version's scores on the test it was evaluated on last; empty if none are stored.

    Raises:
        DataError: they are not readable.
    """
    folder = version.tags.get(CURRENT_EVALUATION)
    return _read_items(client, version, folder) if folder else []


def _read_items(client: MlflowClient, version: ModelVersion, folder: str) -> list[ItemScores]:
    # The scores are in memory when the temporary folder goes.
    with tempfile.TemporaryDirectory() as temporary:
        path = f"{EVALUATIONS}/{folder}/{ITEMS}"
        return read_item_scores(Path(client.download_artifacts(get_run_id(version), path, temporary)))


def read_scores(client: MlflowClient, version: ModelVersion) -> list[dict[str, Any]]:
    """Return the records of its latest evaluation's scores.json; empty if it has none.

    Raises:
        DataError: the file is damaged.
    """
    folder = version.tags.get(CURRENT_EVALUATION)
    if not folder:
        return []
    with tempfile.TemporaryDirectory() as temporary:
        local = client.download_artifacts(get_run_id(version), f"{EVALUATIONS}/{folder}/{SCORES}", temporary)
        try:
            return list(json.loads(Path(local).read_text(encoding="utf-8")))
        except ValueError as error:
            raise DataError(f"{version.name} version {version.version}: damaged {folder}/{SCORES}: {error}") from None


def log_lineage(client: MlflowClient, run_id: str, record: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Keep the record and `files` (name -> text) with the run, secrets removed; return the stored record's sha256."""
    # The record names the stored files by hash, so the hash of the record covers them all.
    stored, hashes = {}, {}
    for name, text in files.items():
        # YAML files also lose what is secret by its key; other texts have no keys to look at.
        stored[name] = redact_yaml(text) if name.endswith(YAML) else redact(text)
        hashes[name] = hashlib.sha256(stored[name].encode()).hexdigest()
    record_text = json.dumps({**redacted(dict(record)), "kept": hashes}, indent=2, sort_keys=True, ensure_ascii=False)
    for name, text in {RECORD: record_text, **stored}.items():
        client.log_text(run_id, text, f"{LINEAGE}/{name}")
    return hashlib.sha256(record_text.encode()).hexdigest()


def read_lineage(client: MlflowClient, version: ModelVersion) -> dict[str, Any] | None:
    """Return the version's lineage record; None if none was kept.

    Raises:
        DataError: the record is damaged.
    """
    text = read_lineage_file(client, version, RECORD)
    if text is None:
        return None
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise DataError(f"{version.name} version {version.version}: damaged {LINEAGE}/{RECORD}: {error}") from None


def read_lineage_file(client: MlflowClient, version: ModelVersion, name: str) -> str | None:
    """Return a file of the version's `lineage/`; None if it does not exist."""
    # Listed first, because each kind of store reports a missing file by another error.
    if not any(Path(f.path).name == name for f in client.list_artifacts(get_run_id(version), LINEAGE)):
        return None
    with tempfile.TemporaryDirectory() as temporary:
        local = client.download_artifacts(get_run_id(version), f"{LINEAGE}/{name}", temporary)
        return Path(local).read_text(encoding="utf-8")
