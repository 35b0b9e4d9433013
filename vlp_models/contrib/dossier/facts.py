"""What the records say about a registered version: all that the files of a dossier are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import hash_file
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.params.load import read_plain, read_yaml_text
from vlp_models.registry.evaluations import read_lineage, read_scores
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.versions import download_verified_bundle
from vlp_models.serving.bundle import CODE, code_file, read_content

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ANSWERS = "dossier.yaml"  # in the project: what no record has, by the number of the item, in the provider's words


@dataclass(frozen=True, kw_only=True)
class Facts:
    """
    files: of the bundle -> sha256. code: the version's copy of the code that predicts, file -> sha256.
    registered: when, in UTC.
    decisions: the ledger's lines about the model. answers: the provider's, by the number of the item.
    """

    name: str
    version: int
    content: str
    registered: str
    files: Mapping[str, str]
    code: Mapping[str, str]
    tags: Mapping[str, str]
    lineage: Mapping[str, Any]
    scores: list[dict[str, Any]]
    decisions: list[Mapping[str, Any]]
    answers: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"{self.name} version {self.version}"


def gather(client: MlflowClient, params: Params, root: Path, version: ModelVersion, lines: int | None = None) -> Facts:
    """Read everything about a version.

    Args:
        lines: of the ledger that count; None: all. An earlier dossier knew fewer.

    Raises:
        DataError: it has no lineage, its files are gone or not those that were registered, or a record is damaged.
    """
    lineage = read_lineage(client, version)
    if lineage is None:
        raise DataError(f"{version.name} version {version.version}: no lineage is kept with it, so there is no dossier")
    bundle = download_verified_bundle(version)
    content = read_content(bundle)
    entries = Ledger(root / params.promotion.ledger).entries()[:lines]
    registered = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC)
    return Facts(
        name=version.name,
        version=int(version.version),
        content=version.tags.get("content", ""),
        registered=registered.strftime("%Y-%m-%dT%H:%M:%SZ"),
        files=dict(sorted(content["files"].items())),
        code=_hash_code(bundle.parents[1] / CODE, content["code"]),
        tags=version.tags,
        lineage=lineage,
        scores=read_scores(client, version),
        decisions=select_decisions(entries, version.name),
        answers=_read_answers(root / ANSWERS),
    )


def select_decisions(entries: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Return the ledger's lines about a model; a line about forgotten images names the models by their versions."""
    return [entry for entry in entries if entry.get("model") == name or name in (entry.get("versions") or ())]


def _hash_code(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return file -> sha256 of a version's copy of its code.

    The hashes in content.json leave out comments and docstrings, so they are not those of a file.
    """
    # An entry point such as `vlp_models.tasks.vqa:VQA` is no file.
    files = [file for name in names if (file := code_file(root, name)).is_file()]
    return {file.relative_to(root.parent).as_posix(): hash_file(file) for file in sorted(files)}


def _read_answers(file: Path) -> dict[str, str]:
    """
    Raises:
        ParamsError: the file is not valid YAML. DataError: it is not a mapping of texts.
    """
    if not file.exists():
        return {}
    answers = read_plain(read_yaml_text(file), file) or {}
    if not isinstance(answers, dict) or not all(isinstance(text, str) for text in answers.values()):
        raise DataError(f"{file}: write one text for each item, such as `1a: Captions for the archive of ...`")
    return {str(number): text.strip() for number, text in answers.items()}
