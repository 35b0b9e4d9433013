"""The ledger's lines in the registry, where all checkouts find them: the versions of a registered model of its own.

MLflow numbers the versions of a model itself, each number once, whoever asks. So that of two checkouts that decide at
the same time one comes first, without a lock or a clock: a line names the one before it by its hash, and counts only if
that still is the last one when the registry gives it its number. A line that came too late stays where it is and counts
for nothing; its writer is told, and decides anew.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vlp_models.registry.client import model_called
from vlp_models.registry.promotion.ledger import START, LedgerError, hash_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

LINE = "line"  # tag of a version
SOURCE = "vlp-ledger://line"  # MLflow wants one; a ledger has no files


class RegistryLog:
    """name: of the registered model that holds the lines."""

    def __init__(self, client: MlflowClient, name: str) -> None:
        self._client, self._name = client, name

    def add(self, line: bytes) -> bool:
        """Whether the line counts: it names the last one as the one before it."""
        if model_called(self._client, self._name) is None:
            self._create()
        entry = json.loads(line)
        self._client.create_model_version(
            self._name, SOURCE, tags={LINE: line.decode()}, description=f"{entry['kind']}: {entry['action']}"
        )
        return line in self.lines()  # MLflow's client may have sent it twice, and the first one counts

    def lines(self) -> list[bytes]:
        """Those that count, in order.

        Raises:
            LedgerError: one was changed or taken out.
        """
        lines: list[bytes] = []
        hashes = [START]
        for version in self._versions():
            line = version.tags.get(LINE, "").encode()
            try:
                previous, seq = (json.loads(line)[key] for key in ("previous", "seq"))
            except (ValueError, KeyError, TypeError):
                raise LedgerError(f"{self._name} version {version.version}: no ledger line: {CHANGED}") from None
            if previous == hashes[-1] and seq == len(hashes):
                lines.append(line)
                hashes.append(hash_line(line))
            elif previous not in hashes:
                raise LedgerError(
                    f"{self._name} version {version.version}, line {seq}: the chain is broken here (the line before it "
                    f"is not what it was, or missing): {CHANGED}"
                )
        return lines

    def _versions(self) -> list[ModelVersion]:
        found: list[ModelVersion] = []
        token = None
        while True:
            page = self._client.search_model_versions(f"name='{self._name}'", max_results=200, page_token=token)
            found += page
            token = page.token
            if not token:
                return sorted(found, key=lambda version: int(version.version))

    def _create(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self._name, description="The ledger of promotions; no model.")
        except MlflowException as error:  # another checkout was quicker
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


CHANGED = (
    "the ledger in the registry was changed; take the registry from its backup, or delete this registered model: the "
    "next promotion makes it again from promotions/ledger.jsonl"
)
