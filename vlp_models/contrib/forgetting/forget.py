"""`vlp forget`: report which models were trained on images, withdraw the images, and record it in the ledger."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.catalog import Catalog, ImageCopy, ImageIdentity, Query, find_copies, resolve_queries
from vlp_models.contrib.forgetting.data_versions import DataVersions
from vlp_models.contrib.forgetting.exposure import (
    CheckpointExposures,
    Exposure,
    Leftover,
    leftovers,
    resume_state_exposure,
)
from vlp_models.contrib.forgetting.registered import RegisteredVersion, find_registered, read_lineages
from vlp_models.contrib.forgetting.withdrawn import WithdrawnImage, withdraw
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.params import Params
from vlp_models.pipeline.promotion_commands import open_ledger
from vlp_models.registry.client import connect, database_exists, mlflow_errors, tracking_uri
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.promotion.reconcile import PromotionContext, move_aliases, reconcile
from vlp_models.registry.versions import CHAMPION

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, kw_only=True)
class ForgetReport:
    """The images and everything that was trained on them; nothing has changed yet.

    queries      the images that the user named
    copies       those images and their copies in the datasets
    checkpoints  exposure of everything in the workspace
    states       exposure of resume states
    versions     registered versions with their exposure
    client       of the registry; None without a registry
    """

    queries: list[Query]
    copies: list[ImageCopy]
    checkpoints: list[Exposure]
    states: list[tuple[Leftover, Exposure]]
    versions: list[RegisteredVersion]
    exposures: CheckpointExposures
    client: MlflowClient | None = field(repr=False)

    @property
    def images(self) -> list[str]:
        """sha256 of each queried image and each copy."""
        hashes = [query.sha256 for query in self.queries] + [copy.image.sha256 for copy in self.copies]
        return list(dict.fromkeys(hashes))

    @property
    def champions(self) -> list[RegisteredVersion]:
        """Champions that were, or may have been, trained on an image."""
        return [v for v in self.versions if CHAMPION in v.aliases and not v.exposure.clean]


def find_exposure(params: Params, workspace: Workspace, names: Sequence[str], *, exact: bool = False) -> ForgetReport:
    """Find the images, their copies, and every model that was trained on them.

    Args:
        names: ids, paths in a dataset, or image files.
        exact: only equal bytes or pixels count as copies.

    Raises:
        DataError: a name is not an image, or a dataset is not prepared yet.
        TrackingError: MLflow is unreachable.
    """
    catalog = Catalog(params, workspace)
    queries = resolve_queries(names, catalog, params, workspace)
    rules = NearRules.of(params.validate.near_duplicates)
    copies = find_copies(queries, catalog, rules, exact=exact)
    with mlflow_errors(params):
        client = None
        # Do not create an empty registry by connecting to it.
        if params.tracking.uri and database_exists(tracking_uri(params.tracking, workspace.root)):
            client = connect(params.tracking, workspace.root)
        lineages = read_lineages(client, params) if client is not None else {}
        data = DataVersions(
            workspace=workspace,
            queries=queries,
            copies=copies,
            rules=rules,
            catalog=catalog,
            exact=exact,
            recorded=[lineage.get("dvc", {}) for lineage in lineages.values()],
        )
        exposures = CheckpointExposures(params, workspace, data)
        versions = find_registered(client, params, workspace, exposures, data, lineages) if client is not None else []
    return ForgetReport(
        queries=queries,
        copies=copies,
        checkpoints=exposures.all(),
        states=[(state, resume_state_exposure(state, exposures)) for state in leftovers(workspace)],
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
    # An entry per file content: ids of all dataset images with it, none if it is in no dataset.
    # A queried image that is in no dataset is withdrawn as well: it may arrive later.
    ids: dict[str, list[str]] = {query.sha256: [] for query in report.queries}
    images: dict[str, ImageIdentity] = {query.sha256: query for query in report.queries}
    for copy in report.copies:
        ids.setdefault(copy.image.sha256, []).append(copy.image.image_id)
        images[copy.image.sha256] = copy.image
    entries = [
        WithdrawnImage.create(sha256, image.pixels, image.fingerprint, ids[sha256], keep_fingerprint=keep_fingerprint)
        for sha256, image in images.items()
    ]
    new = withdraw(workspace.withdrawn, entries)
    with mlflow_errors(params):
        _record_withdrawal(open_ledger(params, workspace), report, by)
    return new


def remove_aliases(params: Params, workspace: Workspace, report: ForgetReport, *, by: str) -> list[str]:
    """Remove all aliases of versions that were, or may have been, trained on an image; return a line per model.

    Raises:
        LedgerError: the ledger was changed.
    """
    lines = []
    for model in sorted({version.model for version in report.versions if not version.exposure.clean}):
        dirty = [version for version in report.versions if version.model == model and not version.exposure.clean]
        if report.client is None or not any(version.aliases for version in dirty):
            continue
        with mlflow_errors(params):
            context = PromotionContext(
                client=report.client,
                ledger=open_ledger(params, workspace),
                task=dirty[0].task,
                model=model,
                user=by,
            )
            number = withdraw_versions(context, {version.version for version in dirty}, "forget")
        champion = f"version {number}" if number else "none, until `vlp promote`"
        lines.append(f"{model}: {len(dirty)} versions lost their aliases; champion is {champion}")
    return lines


def withdraw_versions(ctx: PromotionContext, versions: Set[int], reason: str) -> int | None:
    """Remove every alias from these versions; they return only if requested by number. Return the champion afterwards.

    Raises:
        LedgerError: the ledger was changed, or it and MLflow's aliases disagree.
    """
    with ctx.ledger.locked():
        agreed = reconcile(ctx, allow_missing=True)
        # Contents, because numbers change when a registry is rebuilt; a missing version has none.
        contents = {agreed.registry.content(number) for number in versions} - {""}
        ctx.ledger.append(
            {
                "action": "withdrawn",
                "task": ctx.task,
                "model": ctx.model,
                "version": None,
                "from": agreed.champion,
                "versions": sorted(versions),
                "contents": sorted(contents),
                "reason": reason,
                "by": ctx.user,
            }
        )
        registry = move_aliases(ctx)  # first: an interruption must not leave the model without its champion
        # Aliases that the ledger does not move, such as `challenger` and `run-RUN`.
        for alias, version in registry.aliases.items():
            if version in versions:
                ctx.client.delete_registered_model_alias(ctx.model, alias)
        return registry.champion


def _record_withdrawal(ledger: Ledger, report: ForgetReport, by: str) -> None:
    """Append a ledger line with the images that have none yet, if there are any."""
    affected: dict[str, list[dict[str, Any]]] = {}
    for version in report.versions:
        if not version.exposure.clean:
            entry = {"version": version.version, "aliases": list(version.aliases), "content": version.content}
            affected.setdefault(version.model, []).append({**entry, "state": version.exposure.state})
    # The lock covers reading and appending: two commands at once would record an image twice.
    with ledger.locked():
        recorded = {sha256 for line in ledger.entries() for sha256 in line.get("images", [])}
        if new := [sha256 for sha256 in report.images if sha256 not in recorded]:
            ledger.append(
                {
                    "action": "forgotten",
                    "task": "",
                    "model": "",  # of all
                    "version": None,
                    "from": None,
                    "by": by,
                    "checkpoints": {e.name: e.state for e in report.checkpoints if not e.clean},
                    "versions": affected,
                    "champions": [f"{version.model}/{version.version}" for version in report.champions],
                    "images": new,
                }
            )
