"""What is decided goes on record and moves aliases, under the ledger's lock; what a kill left half done is mended."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.registry.client import model_called
from vlp_models.registry.promotion.ledger import Entry, Ledger, State
from vlp_models.registry.versions import CHALLENGER, CHAMPION, PREVIOUS, by_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from vlp_models.registry.promotion.promote import Decision

HEAD = "promotion.head"  # tag of the registered model: the last ledger line that MLflow has seen
MAX_TAG = 450  # characters


def record_decision(
    client: MlflowClient, ledger: Ledger, action: Literal["promote", "rollback"], decision: Decision, by: str
) -> None:
    """The ledger's line, which decides, then the aliases, which follow it; a refusal moves none.

    Raises:
        Overtaken: another checkout was quicker; nothing has moved.
    """
    model, version = decision.model, decision.version
    entry = {
        "kind": "refused" if decision.outcome == "refused" else "done",
        "action": action,
        "task": decision.task,
        "model": model,
        "version": version,
        "from": decision.champion,
        "by": by,
        **decision.makers(),
        "decision": decision.plain(),
    }
    if entry["kind"] == "done":
        entry["content"] = next((tags.get("content", "") for n, tags in _tags(client, model) if n == version), "")
    ledger.append(entry)
    if entry["kind"] == "done":
        _follow(client, ledger, model)
    mirror(client, ledger, model)


def withdraw_versions(
    client: MlflowClient, ledger: Ledger, state: State, *, task: str, model: str, versions: Set[int], why: str, by: str
) -> None:
    """Takes every alias off these versions; the champion is then the last one before that is none of them, if there is
    one. Within `locked`.

    Raises:
        Overtaken: another checkout was quicker; nothing has moved.
    """
    champions = [version for version in state.champions if version not in versions]
    entry: Entry = {"kind": "done", "action": "withdraw", "task": task, "model": model, "version": None}
    entry |= {"from": state.champion, "champions": champions, "withdrawn": sorted(versions), "why": why, "by": by}
    ledger.append(entry)
    _follow(client, ledger, model)
    found = model_called(client, model)
    for alias, version in dict(found.aliases).items() if found is not None else ():
        if int(version) in versions:
            client.delete_registered_model_alias(model, alias)
    mirror(client, ledger, model)


def put_in_order(client: MlflowClient, ledger: Ledger, *, task: str, model: str, by: str) -> State:
    """Compares ledger and registry, ends what was begun, and returns the state that both now hold.

    Aliases that a kill kept from following the ledger follow it now. A champion that was set past the ledger is taken
    over, with a warning and an entry of its own; so is that of a registry that was lost or put back to an earlier day.

    Raises:
        LedgerError: the ledger's chain is broken.
        Overtaken: another checkout was quicker.
    """
    entries, hashes = ledger.entries(), ledger.hashes()
    state = ledger.state(model)
    if state.pending is not None:
        state = _end_intent(client, ledger, state.pending, model, by)
    head = _head(client, model)
    seen = head["seq"] if head is not None and hashes and head["ledger"] == hashes[0] else 0
    if seen > len(entries):
        print(f"{ledger.path}: MLflow has seen {seen} lines, {len(entries)} are left; going on", file=sys.stderr)
    found = _alias(client, model, CHAMPION)
    if found != state.champion and state.moved > seen and _is_same(client, model, state, found):
        _follow(client, ledger, model)
        found = _alias(client, model, CHAMPION)
    if found != state.champion or (found is not None and not _is_as_promoted(client, model, state, found)):
        _adopt(client, ledger, state, found, anew=head is None, task=task, model=model, by=by)
        state = ledger.state(model)
        _follow(client, ledger, model)
    if state.champion is not None:
        _set_previous(client, model, state)
        mirror(client, ledger, model)
    elif ledger.entries() and model_called(client, model) is not None:
        mirror(client, ledger, model)
    return state


def unfinished(client: MlflowClient, ledger: Ledger, model: str) -> Entry | None:
    """The last move of a model's aliases, if its ledger has it and MLflow's tags do not: it was cut off. A registry
    that was lost, and begun anew, can't tell."""
    hashes = ledger.hashes()
    last = next((e for e in reversed(ledger.entries()) if e["model"] == model and e["kind"] == "done"), None)
    head = _head(client, model)
    if last is None or head is None or head["ledger"] != hashes[0]:
        return None
    return last if last["seq"] > head["seq"] else None


def _end_intent(client: MlflowClient, ledger: Ledger, intent: Entry, model: str, by: str) -> State:
    """Of ledgers from before one line decided: an intent whose alias has moved is completed, another one undone."""
    kept = {"action", "task", "model", "version", "from", "run", "run_model", "from_run", "from_run_model"}
    entry = {key: value for key, value in intent.items() if key in kept} | {"by": by, "after": "an interruption"}
    moved = _alias(client, model, CHAMPION) == intent["version"]
    ledger.append({**entry, "kind": "done" if moved else "undone"})
    return ledger.state(model)


def _follow(client: MlflowClient, ledger: Ledger, model: str) -> None:
    """The aliases follow the ledger, and the registry's own, should another checkout have added to it meanwhile."""
    while True:
        state = ledger.state(model)
        _set_alias(client, model, CHAMPION, state.champion)
        if state.champion is not None and _alias(client, model, CHALLENGER) == state.champion:
            client.delete_registered_model_alias(model, CHALLENGER)
        _set_previous(client, model, state)
        if not ledger.refresh():
            return


def _set_previous(client: MlflowClient, model: str, state: State) -> None:
    """None where it was deleted, or the registry means another version by its number."""
    before = state.previous
    sound = before is not None and _is_as_promoted(client, model, state, before)
    _set_alias(client, model, PREVIOUS, before if sound else None)


def _is_same(client: MlflowClient, model: str, state: State, found: int | None) -> bool:
    """Whether the ledger's champion is still the version that was promoted, and nobody has chosen another one since."""
    before = state.champions[:-1] + sorted(state.withdrawn)
    if state.champion is None:  # it was withdrawn, and there was none before it
        return found in state.withdrawn
    return (found is None or found in before) and _is_as_promoted(client, model, state, state.champion)


def _is_as_promoted(client: MlflowClient, model: str, state: State, version: int) -> bool:
    """Whether the registry has this number, and still means by it what the ledger does."""
    known = dict(_tags(client, model))
    return version in known and state.contents.get(version, "") in ("", known[version].get("content", ""))


def _tags(client: MlflowClient, model: str) -> list[tuple[int, dict[str, str]]]:
    return [(int(v.version), dict(v.tags)) for v in client.search_model_versions(f"name='{model}'")]


def _adopt(
    client: MlflowClient, ledger: Ledger, state: State, found: int | None, *, anew: bool, task: str, model: str, by: str
) -> None:
    """anew: the registry knows of no decision on this model: it was lost, and registered again."""
    said = f"version {state.champion}" if state.champion else "none"
    registry = _tags(client, model)
    known = dict(registry)
    if anew and found is None and state.champion is not None and (content := state.contents.get(state.champion)):
        # The champion may be there by another number.
        found = max((number for number, tags in registry if tags.get("content") == content), default=None)
    moved = any(n in known and known[n].get("content") != c for n, c in state.contents.items())
    renumbered = moved or (anew and bool(state.champions or state.withdrawn))
    champions: list[int]
    if found is None and state.champion not in known and not renumbered:
        # It was deleted: the one before it, but none that was rolled back since.
        champions = [version for version in state.champions if version in known and version not in state.withdrawn]
        found = champions[-1] if champions else None
    elif found is None:
        champions = []
    elif renumbered or not state.champions:
        before = _alias(client, model, PREVIOUS)
        champions = [*([before] if before not in (None, found) else []), found]  # type: ignore[list-item]
    elif found in state.champions:
        champions = state.champions[: state.champions.index(found) + 1]
    else:
        champions = [*state.champions, found]
    now = f"version {found}" if found else "none"
    print(f"{model}: the ledger's champion is {said}, the registry's {now}: taken over from there", file=sys.stderr)
    contents = {str(number): tags.get("content", "") for number, tags in registry if number in champions}
    ledger.append(
        {
            "kind": "adopted",
            "action": "adopt",
            "task": task,
            "model": model,
            "version": found,
            "from": state.champion,
            "champions": champions,
            "contents": contents,
            "renumbered": renumbered,
            "by": by,
        }
    )


def mirror(client: MlflowClient, ledger: Ledger, model: str) -> None:
    """Brings MLflow's tags up to the ledger's last line; after a kill the next call catches up."""
    entries, hashes = ledger.entries(), ledger.hashes()
    head = _head(client, model)
    seen = head["seq"] if head and head["ledger"] == hashes[0] else 0
    last = None
    for entry, digest in zip(entries, hashes, strict=True):
        if entry["model"] != model:
            continue
        last = {"ledger": hashes[0], "seq": entry["seq"], "sha256": digest}
        if entry["seq"] > seen and entry["version"] is not None and entry["kind"] != "intent":
            _tag_version(client, entry, digest)
    if last is not None and (head is None or last != head):
        text = json.dumps(last)
        _twice(lambda: client.set_registered_model_tag(model, HEAD, text))


def _tag_version(client: MlflowClient, entry: Entry, digest: str) -> None:
    from mlflow.exceptions import MlflowException

    reasons = "; ".join(entry.get("decision", {}).get("reasons", []))
    outcome = f"{entry['action']}: {entry['kind']}"
    tags = {"outcome": outcome, "time": entry["time"], "by": entry["by"], "reasons": reasons, "entry": digest}
    with contextlib.suppress(MlflowException):  # a version that is not registered can't carry tags
        for key, value in tags.items():
            write = functools.partial(client.set_model_version_tag, entry["model"], str(entry["version"]))
            _twice(functools.partial(write, f"promotion.{key}", value[:MAX_TAG]))


def _head(client: MlflowClient, model: str) -> dict[str, Any] | None:
    found = model_called(client, model)
    text = found.tags.get(HEAD) if found is not None else None
    return json.loads(text) if text else None


def _alias(client: MlflowClient, model: str, alias: str) -> int | None:
    version = by_alias(client, model, alias)
    return int(version.version) if version else None


def _set_alias(client: MlflowClient, model: str, alias: str, version: int | None) -> None:
    if _alias(client, model, alias) == version:
        return
    if version is None:
        client.delete_registered_model_alias(model, alias)
    else:
        _twice(lambda: client.set_registered_model_alias(model, alias, str(version)))


def _twice(write: Callable[[], None]) -> None:
    """MLflow inserts what is new, and of two checkouts that catch up at once one fails: the second time it updates."""
    from mlflow.exceptions import MlflowException

    try:
        write()
    except MlflowException:
        write()
