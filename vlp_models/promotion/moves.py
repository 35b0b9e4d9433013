"""Moving aliases under the ledger's lock, and putting in order what a killed call left behind."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from vlp_models.promotion.ledger import Entry, Ledger, LedgerError, State
from vlp_models.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS, by_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient

HEAD = "promotion.head"  # tag of the registered model: the last ledger line that MLflow has seen
MAX_TAG = 450  # characters


def move_champion(
    client: MlflowClient,
    ledger: Ledger,
    action: str,
    *,
    task: str,
    model: str,
    to: int,
    by: str,
    decision: dict[str, Any],
    makers: dict[str, str],
) -> None:
    """Intent, aliases, end. `action`: promote or rollback; `makers`: the runs and models behind the two versions."""
    before = ledger.state(model).champion
    entry = {"action": action, "task": task, "model": model, "version": to, "from": before, "by": by, **makers}
    ledger.append({**entry, "kind": "intent", "decision": decision})
    client.set_registered_model_alias(model, CHAMPION, str(to))
    _finish(client, ledger, entry)
    mirror(client, ledger, model)


def put_in_order(client: MlflowClient, ledger: Ledger, *, task: str, model: str, by: str) -> State:
    """Compares ledger and registry, ends what was begun, and returns the state that both now hold.

    An intent whose alias has moved is completed, one whose alias has not is undone. A champion that was set past the
    ledger is taken over, with a warning and an entry of its own.

    Raises:
        LedgerError: the ledger's chain is broken, or its end is not what MLflow has seen.
    """
    _check_head(client, ledger, model)
    state = ledger.state(model)
    found = _alias(client, model, CHAMPION)
    if state.pending is not None:
        intent = state.pending
        kept = {"action", "task", "model", "version", "from", "run", "run_model", "from_run", "from_run_model"}
        entry = {key: value for key, value in intent.items() if key in kept}
        entry |= {"by": by, "after": "an interruption"}
        if found == intent["version"]:
            _finish(client, ledger, entry)
        else:
            ledger.append({**entry, "kind": "undone"})
        state = ledger.state(model)
    if found != state.champion:
        _adopt(client, ledger, state, found, task=task, model=model, by=by)
        state = ledger.state(model)
    if found is not None:
        _set_alias(client, model, PREVIOUS, state.previous)
        mirror(client, ledger, model)
    elif ledger.entries() and _known(client, model):
        mirror(client, ledger, model)
    return state


def _finish(client: MlflowClient, ledger: Ledger, entry: Entry) -> None:
    """What follows the champion's alias, whether it moved just now or before an interruption."""
    model, version = entry["model"], entry["version"]
    if _alias(client, model, CHALLENGER) == version:
        client.delete_registered_model_alias(model, CHALLENGER)
    ledger.append({**entry, "kind": "done"})
    _set_alias(client, model, PREVIOUS, ledger.state(model).previous)


def _adopt(
    client: MlflowClient, ledger: Ledger, state: State, found: int | None, *, task: str, model: str, by: str
) -> None:
    if found is None:
        champions: list[int] = []
    elif found in state.champions:
        champions = state.champions[: state.champions.index(found) + 1]
    else:
        before = _alias(client, model, PREVIOUS) if not state.champions else None
        champions = [*state.champions, *([before] if before not in (None, found) else []), found]  # type: ignore[list-item]
    said = f"version {state.champion}" if state.champion else "none"
    now = f"version {found}" if found else "none"
    print(f"{model}: the ledger's champion is {said}, the registry's {now}: taken over from there", file=sys.stderr)
    ledger.append(
        {
            "kind": "adopted",
            "action": "adopt",
            "task": task,
            "model": model,
            "version": found,
            "from": state.champion,
            "champions": champions,
            "by": by,
        }
    )


def _check_head(client: MlflowClient, ledger: Ledger, model: str) -> None:
    """The last lines have no successor that would betray a change; MLflow's copy of their hash does."""
    hashes = ledger.hashes()
    ledger.entries()  # the chain
    head = _head(client, model)
    if head is None or not hashes:
        return
    if head["ledger"] != hashes[0]:
        print(f"{ledger.path}: not the ledger that MLflow knows for {model}; going on with this one", file=sys.stderr)
        return
    if head["seq"] > len(hashes):
        raise LedgerError(
            f"{ledger.path}, line {len(hashes) + 1}: missing: MLflow has seen {head['seq']} lines of this ledger"
        )
    if hashes[head["seq"] - 1] != head["sha256"]:
        raise LedgerError(f"{ledger.path}, line {head['seq']}: not what was written: its sha256 differs from MLflow's")


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
        client.set_registered_model_tag(model, HEAD, json.dumps(last))


def _tag_version(client: MlflowClient, entry: Entry, digest: str) -> None:
    from mlflow.exceptions import MlflowException

    reasons = "; ".join(entry.get("decision", {}).get("reasons", []))
    outcome = f"{entry['action']}: {entry['kind']}"
    tags = {"outcome": outcome, "time": entry["time"], "by": entry["by"], "reasons": reasons, "entry": digest}
    with contextlib.suppress(MlflowException):  # a version that is not registered can't carry tags
        for key, value in tags.items():
            client.set_model_version_tag(entry["model"], str(entry["version"]), f"promotion.{key}", value[:MAX_TAG])


def _head(client: MlflowClient, model: str) -> dict[str, Any] | None:
    found = [m for m in client.search_registered_models(f"name='{model}'") if m.name == model]
    text = found[0].tags.get(HEAD) if found else None
    return json.loads(text) if text else None


def _known(client: MlflowClient, model: str) -> bool:
    return any(found.name == model for found in client.search_registered_models(f"name='{model}'"))


def _alias(client: MlflowClient, model: str, alias: str) -> int | None:
    version = by_alias(client, model, alias)
    return int(version.version) if version else None


def _set_alias(client: MlflowClient, model: str, alias: str, version: int | None) -> None:
    if _alias(client, model, alias) == version:
        return
    if version is None:
        client.delete_registered_model_alias(model, alias)
    else:
        client.set_registered_model_alias(model, alias, str(version))
