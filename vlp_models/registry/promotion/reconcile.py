"""Compare the ledger with MLflow's aliases, and move the aliases: only after a line, and always the same way.

A decision is made when its line is in the ledger; the aliases follow, and last a tag of the registered model with the
hash of that line. A kill in between is completed by the next call (`reconcile`).

Two checkouts have a ledger file each, and no lock between them. The tag distinguishes them: if it is not the hash of a
line of this ledger, another checkout has decided, and nothing is decided here until its lines are pulled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlp_models.common.log import get_logger
from vlp_models.registry.client import find_model
from vlp_models.registry.promotion.ledger import Entry, Ledger, LedgerError, Promoted, State, replay
from vlp_models.registry.versions import CHALLENGER, CHAMPION, PREVIOUS

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = get_logger(__name__)

LEDGER_TAG = "promotion.ledger"  # tag of a registered model: hash of the ledger line that its aliases follow


@dataclass(frozen=True, kw_only=True)
class PromotionContext:
    """Where decisions on one task are recorded and carried out. user: whom the ledger names."""

    client: MlflowClient
    ledger: Ledger
    task: str
    model: str
    user: str


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The state of a model in MLflow.

    aliases: alias -> version. contents: version -> content. head: hash of the ledger line that the aliases follow.
    exists: whether the model is registered.
    """

    aliases: Mapping[str, int]
    contents: Mapping[int, str]
    head: str
    exists: bool

    @property
    def champion(self) -> int | None:
        return self.aliases.get(CHAMPION)

    def content(self, version: int | None) -> str:
        """Return the content of a version; empty for None, or if it is not registered."""
        return "" if version is None else self.contents.get(version, "")

    def locate(self, promoted: Promoted | None) -> int | None:
        """Return the number of a version of the ledger; another one than there if the registry was rebuilt."""
        if promoted is None:
            return None
        # Usually the number in the ledger is right; a rebuilt registry gives other numbers.
        if self.contents.get(promoted.version) == promoted.content:
            return promoted.version
        # Versions of other programs have no content, and all of them would match an empty one.
        if not promoted.content:
            return None
        return max((n for n, content in self.contents.items() if content == promoted.content), default=None)

    def locate_champion(self, state: State) -> int | None:
        return self.locate(state.champions[-1]) if state.champions else None

    def locate_previous(self, state: State) -> int | None:
        """Return the latest earlier champion that is registered and was not rolled back or withdrawn since."""
        # Newest first, so `next` returns the latest one that is registered.
        earlier = (self.locate(p) for p in reversed(state.champions[:-1]) if p.content not in state.withdrawn)
        return next((number for number in earlier if number is not None), None)


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """Ledger and registry after they were compared.

    champion, previous: numbers in the registry. completed: the ledger line whose aliases a kill had not moved.
    """

    state: State
    registry: Registry
    champion: int | None
    previous: int | None
    completed: Entry | None = None


def read_registry(client: MlflowClient, model: str) -> Registry:
    registered = find_model(client, model)
    aliases = {} if registered is None else dict(registered.aliases)
    return Registry(
        aliases={alias: int(version) for alias, version in aliases.items()},
        contents={int(v.version): v.tags.get("content", "") for v in client.search_model_versions(f"name='{model}'")},
        head="" if registered is None else registered.tags.get(LEDGER_TAG, ""),
        exists=registered is not None,
    )


def reconcile(ctx: PromotionContext, *, allow_missing: bool = False) -> Reconciled:
    """Compare the ledger with MLflow's aliases, and complete what a kill left half done.

    Aliases that are behind the ledger follow it: after a kill, or in a registry that was rebuilt or restored from a
    backup.

    Args:
        allow_missing: accept a champion that is no longer registered (a rollback leaves it).

    Raises:
        LedgerError: the ledger was changed; or it and the aliases disagree in another way. The message names the way
            out.
    """
    entries, registry = ctx.ledger.entries(), read_registry(ctx.client, ctx.model)
    state = replay(entries).get(ctx.model, State())
    # The aliases follow a line that this ledger does not have.
    if registry.head and registry.head not in state.moves:
        raise LedgerError(
            f"{ctx.ledger.path}: MLflow's aliases of {ctx.model} follow a line that is not in this ledger; another "
            f"checkout decided, or lines were lost: {describe_way_out(ctx, registry)}"
        )
    # The ledger's champion in this registry, where it may have another number.
    champion = registry.locate_champion(state)
    if champion is None and state.champions and not allow_missing:
        raise LedgerError(
            f"{ctx.model}: version {state.champion}, champion by the ledger, is no longer registered. "
            "`vlp run register` registers it again if its checkpoint still exists; "
            f"`vlp rollback {ctx.task}` makes an earlier version champion"
        )
    # The champion when the aliases were last moved; they must not have moved since.
    hashes = [entry["hash"] for entry in entries]
    followed = entries[: hashes.index(registry.head) + 1] if registry.head else []
    at_head = replay(followed).get(ctx.model, State())
    # Either they follow already (the first one), or a kill came before they were moved (the second one).
    expected = {champion, registry.locate_champion(at_head)}
    if champion != state.champion:  # registered again under another number
        expected.add(None)
    if registry.champion not in expected:
        by_ledger = describe_version(champion)
        raise LedgerError(
            f"{ctx.model}: champion by {ctx.ledger.path.name} is {by_ledger}, by MLflow "
            f"{describe_version(registry.champion)}; somebody moved the alias. Set it back to {by_ledger} in "
            f"MLflow, or {_accept_hint(ctx, registry)}"
        )
    # Aliases that are behind follow; that is reported, unless nothing was ever promoted.
    completed = None
    if registry.exists and (registry.head != state.head or registry.champion != champion):
        if registry.head or registry.champion is not None or state.champions:
            logger.warning(
                "%s: MLflow's aliases were behind the ledger; champion is now %s", ctx.model, describe_version(champion)
            )
        # A line that a kill left without its aliases; a registry without the tag was rebuilt, which completes nothing.
        completed = state.last_move if registry.head and registry.head != state.head else None
        registry = move_aliases(ctx)
    return Reconciled(
        state=state,
        registry=registry,
        champion=champion,
        previous=registry.locate_previous(state),
        completed=completed,
    )


def aliases_follow(client: MlflowClient, ledger: Ledger, model: str) -> bool:
    """Return whether MLflow's aliases are those of the ledger's last line, as `reconcile` would leave them."""
    state, registry = ledger.state(model), read_registry(client, model)
    return not registry.exists or (registry.head, registry.champion) == (state.head, registry.locate_champion(state))


def describe_version(version: int | None) -> str:
    return "none" if version is None else f"version {version}"


def _accept_hint(ctx: PromotionContext, registry: Registry) -> str:
    if registry.champion is None:
        return f"delete the tag `{LEDGER_TAG}` of {ctx.model} in MLflow to follow this ledger"
    return f"run `vlp promote {ctx.task} --version {registry.champion}` to record MLflow's champion in this ledger"


def describe_way_out(ctx: PromotionContext, registry: Registry) -> str:
    """Say what to do if MLflow is ahead of the ledger."""
    return f"pull or restore the file (`git pull`); if those lines are lost, {_accept_hint(ctx, registry)}"


def move_aliases(ctx: PromotionContext) -> Registry:
    """Make MLflow's aliases follow the ledger, then note the line that they follow.

    Raises:
        LedgerError: another checkout moved them at the same time.
    """
    client, model = ctx.client, ctx.model
    state, registry = ctx.ledger.state(model), read_registry(client, model)
    champion, previous = registry.locate_champion(state), registry.locate_previous(state)
    aliases = {CHAMPION: champion, PREVIOUS: previous}
    # A champion is no longer a challenger; None removes the alias.
    if champion is not None and registry.aliases.get(CHALLENGER) == champion:
        aliases[CHALLENGER] = None
    for alias, version in aliases.items():
        if registry.aliases.get(alias) == version:
            continue
        if version is None:
            client.delete_registered_model_alias(model, alias)
        else:
            client.set_registered_model_alias(model, alias, str(version))
    if not registry.exists:
        return registry
    # The tag comes last: until then, the next call does all of this again.
    if registry.head != state.head:
        client.set_registered_model_tag(model, LEDGER_TAG, state.head)
    # Read once more: another checkout has a lock of its own, so both may have moved aliases.
    after = read_registry(client, model)
    if (after.champion, after.head) != (champion, state.head):
        raise LedgerError(f"{model}: another checkout decided at the same time: {describe_way_out(ctx, after)}")
    return after
