"""What the records say about a registered version: all that the files of a dossier are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.params.load import read_yaml
from vlp_models.registry.evaluations import read_lineage, read_scores
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.versions import download_bundle
from vlp_models.serving.bundle import read_content

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ANSWERS = "dossier.yaml"  # in the project: what no record has, by the number of the item, in the provider's words


@dataclass(frozen=True, kw_only=True)
class Facts:
    """
    files: of the bundle and the code that serves it -> sha256. made: when the version was registered, in UTC.
    decisions: the ledger's lines about the model. answers: the provider's, by the number of the item.
    """

    name: str
    version: int
    content: str
    made: str
    files: Mapping[str, str]
    tags: Mapping[str, str]
    lineage: Mapping[str, Any]
    scores: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    answers: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"{self.name} version {self.version}"


def gather(client: MlflowClient, params: Params, root: Path, version: ModelVersion, lines: int | None = None) -> Facts:
    """Read everything about a version.

    Args:
        lines: of the ledger that count; None: all. An earlier dossier knew fewer.

    Raises:
        DataError: it has no lineage, its files are gone, or a record is damaged.
    """
    lineage = read_lineage(client, version)
    if lineage is None:
        raise DataError(f"{version.name} version {version.version}: no lineage is kept with it, so there is no dossier")
    content = read_content(download_bundle(version))
    entries = Ledger(root / params.promotion.ledger).entries()[:lines]
    made = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC)
    return Facts(
        name=version.name,
        version=int(version.version),
        content=version.tags.get("content", ""),
        made=made.strftime("%Y-%m-%dT%H:%M:%SZ"),
        # An entry point such as `vlp_models.tasks.vqa:VQA` has no hash.
        files={name: digest for name, digest in sorted({**content["files"], **content["code"]}.items()) if digest},
        tags=version.tags,
        lineage=lineage,
        scores=read_scores(client, version),
        decisions=[entry for entry in entries if entry.get("model") == version.name],
        answers=_read_answers(root / ANSWERS),
    )


def _read_answers(file: Path) -> dict[str, str]:
    """
    Raises:
        ParamsError: the file is not valid YAML. DataError: it is not a mapping of texts.
    """
    if not file.exists():
        return {}
    answers = read_yaml(str(file)) or {}
    if not isinstance(answers, dict) or not all(isinstance(text, str) for text in answers.values()):
        raise DataError(f"{file}: write one text for each item, such as `1a: Captions for the archive of ...`")
    return {str(number): text.strip() for number, text in answers.items()}
