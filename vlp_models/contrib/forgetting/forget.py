"""`vlp forget`: report which models were trained on images, withdraw the images, and record it in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.catalog import Catalog, FoundImage, Query, find_copies, resolve_queries
from vlp_models.contrib.forgetting.data_versions import DataVersions
from vlp_models.contrib.forgetting.exposure import (
    CheckpointExposures,
    Exposure,
    Leftover,
    leftovers,
    resume_state_exposure,
)
from vlp_models.contrib.forgetting.registered import RegisteredVersion, find_registered, read_lineages
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.curation.duplicates.withdrawn import WithdrawnImage, withdraw
from vlp_models.params import Params
from vlp_models.pipeline.promotion_commands import open_ledger
from vlp_models.registry.client import mlflow_errors
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.promotion.promote import withdraw as withdraw_versions
from vlp_models.registry.promotion.reconcile import PromotionContext
from vlp_models.registry.versions import CHAMPION

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, kw_only=True)
class ForgetReport:
    """What was found; nothing has changed yet.

    queries      the images asked for
    found        those images and their copies in the datasets
    checkpoints  exposure of everything in the workspace
    states       exposure of resume states
    versions     registered versions with their exposure
    client       of the registry; None without a registry
    """

    queries: list[Query]
    found: list[FoundImage]
    checkpoints: list[Exposure]
    states: list[tuple[Leftover, Exposure]]
    versions: list[RegisteredVersion]
    exposures: CheckpointExposures
    client: MlflowClient | None = field(repr=False)

    @property
    def images(self) -> list[str]:
        """sha256 of each queried image and each copy."""
        every = [one.sha256 for one in self.queries] + [one.image.sha256 for one in self.found]
        return list(dict.fromkeys(every))

    @property
    def champions(self) -> list[RegisteredVersion]:
        """Champions that were, or may have been, trained on an image."""
        return affected_champions(self.versions)


def find_exposure(params: Params, workspace: Workspace, names: Sequence[str], *, exact: bool = False) -> ForgetReport:
    """Find the images, their copies, and every model that was trained on them.

    Args:
        names: ids, paths in a dataset, or image files.
        exact: only equal bytes or pixels count as copies.

    Raises:
        DataError: a name is not an image, or a dataset is not prepared yet.
        TrackingError: MLflow is unreachable.
    """
    images = Catalog(params, workspace)
    queries = resolve_queries(names, images, params, workspace)
    rules = NearRules.of(params.validate.near_duplicates)
    found = find_copies(queries, images, rules, exact=exact)
    with mlflow_errors(params):
        client = _client(params, workspace)
        records = read_lineages(client, params) if client is not None else {}
        data = DataVersions(
            workspace=workspace,
            queries=queries,
            found=found,
            rules=rules,
            catalog=images,
            exact=exact,
            known=[record.get("dvc", {}) for record in records.values()],
        )
        exposures = CheckpointExposures(params, workspace, data)
        versions = find_registered(client, params, workspace, exposures, data, records) if client is not None else []
    return ForgetReport(
        queries=queries,
        found=found,
        checkpoints=exposures.all(),
        states=[(left, resume_state_exposure(left, exposures)) for left in leftovers(workspace)],
        versions=versions,
        exposures=exposures,
        client=client,
    )


def withdraw_images(
    params: Params, workspace: Workspace, report: ForgetReport, *, keep_fingerprint: bool, by: str
) -> int:
    """Add the images to the withdrawn list and record it in the ledger; return how many are new.

    Raises:
        DataError: the list is damaged.
        LedgerError: the ledger was changed.
    """
    entries = {
        one.sha256: WithdrawnImage.create(
            one.sha256, one.pixels, one.fingerprint, [], keep_fingerprint=keep_fingerprint
        )
        for one in report.queries
    }
    ids: dict[str, list[str]] = {}
    for one in report.found:
        ids.setdefault(one.image.sha256, []).append(one.image.image_id)
    for one in report.found:
        own = one.image
        entries[own.sha256] = WithdrawnImage.create(
            own.sha256, own.pixels, own.fingerprint, ids[own.sha256], keep_fingerprint=keep_fingerprint
        )
    new = withdraw(workspace.withdrawn, entries.values())
    with mlflow_errors(params):
        record_withdrawal(
            open_ledger(params, workspace),
            images=report.images,
            checkpoints=report.checkpoints,
            versions=report.versions,
            by=by,
        )
    return new


def remove_aliases(params: Params, workspace: Workspace, report: ForgetReport, *, by: str) -> list[str]:
    """Remove all aliases of versions that were, or may have been, trained on an image; return a line per model.

    Raises:
        LedgerError: the ledger was changed.
    """
    lines = []
    for model in sorted({one.model for one in report.versions if not one.exposure.clean}):
        dirty = [one for one in report.versions if one.model == model and not one.exposure.clean]
        if report.client is None or not any(one.aliases for one in dirty):
            continue
        with mlflow_errors(params):
            context = PromotionContext(
                client=report.client,
                ledger=open_ledger(params, workspace),
                task=dirty[0].task,
                model=model,
                user=by,
            )
            number = withdraw_versions(context, {one.version for one in dirty}, "forget")
        champion = f"version {number}" if number else "none, until `vlp promote`"
        lines.append(f"{model}: {len(dirty)} versions lost their aliases; champion is {champion}")
    return lines


def _client(params: Params, workspace: Workspace) -> MlflowClient | None:
    from vlp_models.registry.client import connect, database_exists, tracking_uri

    if not params.tracking.uri or not database_exists(tracking_uri(params.tracking, workspace.root)):
        return None
    return connect(params.tracking, workspace.root)


def record_withdrawal(
    ledger: Ledger,
    *,
    images: Sequence[str],
    checkpoints: Sequence[Exposure],
    versions: Sequence[RegisteredVersion],
    by: str,
) -> int:
    """Append a ledger line with the images that have none yet; return how many those are.

    Args:
        images: sha256 of each.

    Raises:
        LedgerError: the ledger was changed.
    """
    affected: dict[str, list[dict[str, Any]]] = {}
    for one in versions:
        if not one.exposure.clean:
            about = {"version": one.version, "aliases": list(one.aliases), "content": one.content}
            affected.setdefault(one.model, []).append({**about, "state": one.exposure.state})
    entry = {
        "action": "forgotten",
        "task": "",
        "model": "",  # of all
        "version": None,
        "from": None,
        "by": by,
        "checkpoints": {exposure.name: exposure.state for exposure in checkpoints if not exposure.clean},
        "versions": affected,
        "champions": [f"{one.model}/{one.version}" for one in affected_champions(versions)],
    }
    with ledger.locked():
        known = {sha256 for line in ledger.entries() for sha256 in line.get("images", [])}
        new = [sha256 for sha256 in dict.fromkeys(images) if sha256 not in known]
        if new:
            ledger.append({**entry, "images": new})
    return len(new)


def affected_champions(versions: Sequence[RegisteredVersion]) -> list[RegisteredVersion]:
    """Return the champions that are not clean."""
    return [one for one in versions if CHAMPION in one.aliases and not one.exposure.clean]
