"""`vlp forget`: looks, and says what it found; takes the pictures out; puts it on record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.withdrawn import WithdrawnImage, withdraw
from vlp_models.forgetting.data_versions import DataVersions
from vlp_models.forgetting.pictures import Asked, Catalogue, Found, find, resolve, rules_of
from vlp_models.forgetting.record import affected_champions, record
from vlp_models.forgetting.saw import Checkpoints, Leftover, Verdict, at_step, leftovers
from vlp_models.forgetting.versions import Registered, lineages, registered
from vlp_models.params import Params
from vlp_models.pipeline.promote import ledger_of
from vlp_models.registry.client import mlflow_errors
from vlp_models.registry.promotion.promote import withdraw as withdraw_versions

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was found. Nothing has changed yet.

    found: the pictures asked for and their copies, in the datasets. states: of interrupted or just finished trainings.
    client: of the registry; None where there is none.
    """

    asked: list[Asked]
    found: list[Found]
    checkpoints: list[Verdict]
    states: list[tuple[Leftover, Verdict]]
    versions: list[Registered]
    asks: Checkpoints
    client: MlflowClient | None = field(repr=False)

    @property
    def pictures(self) -> list[str]:
        """sha256 of each picture asked for, and of each copy."""
        every = [one.sha256 for one in self.asked] + [one.picture.sha256 for one in self.found]
        return list(dict.fromkeys(every))

    @property
    def champions(self) -> list[Registered]:
        """Those that saw it, or of which it can't be told."""
        return affected_champions(self.versions)


def look(params: Params, workspace: Workspace, names: Sequence[str], *, exact: bool = False) -> Looked:
    """
    Args:
        names: ids, paths in a dataset, or picture files.
        exact: copies are equal bytes or pixels only.

    Raises:
        DataError: a name that means no picture, or a dataset that is not prepared yet.
        TrackingError: MLflow can't be reached.
    """
    pictures = Catalogue(params, workspace)
    asked = resolve(names, pictures, params, workspace)
    rules = rules_of(params)
    found = find(asked, pictures, rules, exact=exact)
    with mlflow_errors(params):
        client = _client(params, workspace)
        records = lineages(client, params) if client is not None else {}
        data = DataVersions(
            workspace=workspace,
            asked=asked,
            found=found,
            rules=rules,
            catalogue=pictures,
            exact=exact,
            known=[record.get("dvc", {}) for record in records.values()],
        )
        asks = Checkpoints(params, workspace, data)
        versions = registered(client, params, workspace, asks, data, records) if client is not None else []
    return Looked(
        asked=asked,
        found=found,
        checkpoints=asks.all(),
        states=[(left, at_step(left, asks)) for left in leftovers(workspace)],
        versions=versions,
        asks=asks,
        client=client,
    )


def take_out(params: Params, workspace: Workspace, looked: Looked, *, keep_fingerprint: bool, by: str) -> int:
    """Lists the pictures as withdrawn, and puts it on record; returns how many were not listed before.

    Raises:
        DataError: the list is damaged. LedgerError: the ledger was changed.
    """
    entries = {
        one.sha256: WithdrawnImage.create(
            one.sha256, one.pixels, one.fingerprint, [], keep_fingerprint=keep_fingerprint
        )
        for one in looked.asked
    }
    ids: dict[str, list[str]] = {}
    for one in looked.found:
        ids.setdefault(one.picture.sha256, []).append(one.picture.image_id)
    for one in looked.found:
        own = one.picture
        entries[own.sha256] = WithdrawnImage.create(
            own.sha256, own.pixels, own.fingerprint, ids[own.sha256], keep_fingerprint=keep_fingerprint
        )
    new = withdraw(workspace.withdrawn, entries.values())
    with mlflow_errors(params):
        record(
            looked.client,
            ledger_of(params, workspace),
            pictures=looked.pictures,
            checkpoints=looked.checkpoints,
            versions=looked.versions,
            by=by,
        )
    return new


def take_aliases(params: Params, workspace: Workspace, looked: Looked, *, by: str) -> list[str]:
    """Takes all aliases off the versions that saw a picture, or may have; returns what is so now, in lines.

    Raises:
        LedgerError: the ledger was changed.
    """
    lines = []
    for model in sorted({one.model for one in looked.versions if not one.verdict.clean}):
        dirty = [one for one in looked.versions if one.model == model and not one.verdict.clean]
        if looked.client is None or not any(one.aliases for one in dirty):
            continue
        with mlflow_errors(params):
            state = withdraw_versions(
                looked.client,
                ledger_of(params, workspace),
                task=dirty[0].task,
                model=model,
                versions={one.version for one in dirty},
                why="forget",
                by=by,
            )
        champion = f"version {state.champion}" if state.champion else "none, until `vlp promote`"
        lines.append(f"{model}: {len(dirty)} versions have no alias any more; champion is {champion}")
    return lines


def _client(params: Params, workspace: Workspace) -> MlflowClient | None:
    from vlp_models.registry.client import connect, database_exists, tracking_uri

    if not params.tracking.uri or not database_exists(tracking_uri(params.tracking, workspace.root)):
        return None
    return connect(params.tracking, workspace.root)
