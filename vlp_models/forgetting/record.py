"""What was forgotten, in the ledger: who asked, when, the hashes of the pictures and no more, who had seen them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlp_models.forgetting.saw import Verdict
from vlp_models.forgetting.versions import Registered
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.promotion.log import RegistryLog
from vlp_models.registry.versions import CHAMPION

if TYPE_CHECKING:
    from mlflow import MlflowClient

PICTURES = 200  # of a line: the registry takes lines of 100,000 characters


def record(
    client: MlflowClient | None,
    ledger: Ledger,
    *,
    pictures: Sequence[str],
    checkpoints: Sequence[Verdict],
    versions: Sequence[Registered],
    by: str,
) -> int:
    """Writes a line, or one for each `PICTURES` of them; returns how many. Pictures that are on record stay so.

    Args:
        client: of the registry that has the ledger; None: the file alone.
        pictures: sha256 of each.

    Raises:
        LedgerError: the ledger was changed. Overtaken: another checkout was quicker.
    """
    affected: dict[str, list[dict[str, Any]]] = {}
    for one in versions:
        if not one.verdict.clean:
            about = {"version": one.version, "aliases": list(one.aliases), "content": one.content}
            affected.setdefault(one.model, []).append({**about, "state": one.verdict.state})
    entry = {
        "kind": "forgotten",
        "action": "forget",
        "task": "",
        "model": "",  # of all
        "version": None,
        "from": None,
        "by": by,
        "checkpoints": {told.name: told.state for told in checkpoints if not told.clean},
        "versions": affected,
        "champions": [f"{one.model}/{one.version}" for one in affected_champions(versions)],
    }
    written = 0
    with ledger.locked(RegistryLog(client, ledger.name) if client is not None else None):
        known = {sha256 for line in ledger.entries() for sha256 in line.get("pictures", [])}
        new = [sha256 for sha256 in dict.fromkeys(pictures) if sha256 not in known]
        for start in range(0, len(new), PICTURES):
            ledger.append({**entry, "pictures": new[start : start + PICTURES]})
            written += 1
    return written


def affected_champions(versions: Sequence[Registered]) -> list[Registered]:
    return [one for one in versions if CHAMPION in one.aliases and not one.verdict.clean]
