"""What a registered version keeps beside its weights: its scores item by item, and where it came from.

Both lie in the artifacts of the run that registered it: `evaluations/<test>/` (items.parquet, scores.json), one for
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
CURRENT = "evaluation"  # tag of a version: the folder of its latest evaluation


def run_of(version: ModelVersion) -> str:
    """The run that registered it.

    Raises:
        DataError: none is on record.
    """
    if not version.run_id:
        raise DataError(f"{version.name} version {version.version}: registered without a run, by another program?")
    return version.run_id


def folder_of(items: list[ItemScores]) -> str:
    """The name of an evaluation: what was asked, and how it was scored."""
    asked = sorted({(s.dataset, s.split, s.test, s.metric, s.note) for s in items})
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def log_evaluation(client: MlflowClient, run_id: str, directory: Path) -> str:
    """Keeps `directory`'s scores (reports/eval/RUN) with the run; returns their folder.

    Raises:
        DataError: no readable scores per item.
    """
    folder = folder_of(read_item_scores(directory / ITEMS))
    for name in (ITEMS, SCORES):
        client.log_artifact(run_id, str(directory / name), f"{EVALUATIONS}/{folder}")
    return folder


def evaluations(client: MlflowClient, version: ModelVersion) -> list[list[ItemScores]]:
    """The version's evaluations, the current one first.

    Raises:
        DataError: one can't be read.
    """
    folders = [Path(f.path).name for f in client.list_artifacts(run_of(version), EVALUATIONS) if f.is_dir]
    current = version.tags.get(CURRENT)
    folders.sort(key=lambda folder: folder != current)
    with tempfile.TemporaryDirectory() as temporary:
        return [
            read_item_scores(
                Path(client.download_artifacts(run_of(version), f"{EVALUATIONS}/{folder}/{ITEMS}", temporary))
            )
            for folder in folders
        ]


def latest_evaluation(client: MlflowClient, version: ModelVersion) -> list[ItemScores]:
    """The version's scores on the test it was evaluated on last; empty where none are stored.

    Raises:
        DataError: they can't be read.
    """
    folder = version.tags.get(CURRENT)
    if not folder:
        return next(iter(evaluations(client, version)), [])
    with tempfile.TemporaryDirectory() as temporary:
        return read_item_scores(
            Path(client.download_artifacts(run_of(version), f"{EVALUATIONS}/{folder}/{ITEMS}", temporary))
        )


def log_lineage(client: MlflowClient, run_id: str, record: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Returns the sha256 of the record as it is kept.

    Args:
        files: name -> text, kept as they are but for secrets.
    """
    kept = {name: redact_yaml(text) if name.endswith(YAML) else redact(text) for name, text in files.items()}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in kept.items()}
    record = {**redacted(dict(record)), "kept": hashes}
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    client.log_text(run_id, text, f"{LINEAGE}/{RECORD}")
    for name, kept_text in kept.items():
        client.log_text(run_id, kept_text, f"{LINEAGE}/{name}")
    return hashlib.sha256(text.encode()).hexdigest()


def read_lineage(client: MlflowClient, version: ModelVersion) -> dict[str, Any] | None:
    """None: the version was registered before there was a record.

    Raises:
        DataError: the record can't be read.
    """
    text = read_file(client, version, RECORD)
    if text is None:
        return None
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise DataError(f"{version.name} version {version.version}: damaged {LINEAGE}/{RECORD}: {error}") from None


def read_file(client: MlflowClient, version: ModelVersion, name: str) -> str | None:
    """A file of the version's `lineage/`; None where there is none."""
    if not any(Path(f.path).name == name for f in client.list_artifacts(run_of(version), LINEAGE)):
        return None
    with tempfile.TemporaryDirectory() as temporary:
        local = client.download_artifacts(run_of(version), f"{LINEAGE}/{name}", temporary)
        return Path(local).read_text(encoding="utf-8")


def read_scores(client: MlflowClient, version: ModelVersion) -> list[dict[str, Any]]:
    """The records of its latest evaluation; empty where there is none."""
    folder = version.tags.get(CURRENT)
    if not folder:
        return []
    with tempfile.TemporaryDirectory() as temporary:
        local = client.download_artifacts(run_of(version), f"{EVALUATIONS}/{folder}/{SCORES}", temporary)
        return list(json.loads(Path(local).read_text(encoding="utf-8")))
