"""reports/registered.json: task -> what `register` made of its runs, the best first."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vlp_models.params import TrackingParams

Receipt = dict[str, Any]


def read_registered(reports: Path) -> dict[str, list[Receipt]]:
    """Name, version, run, model, design and content of each version; `challenger` on one. Empty where the file is
    missing or damaged. Written before a task had several versions, it holds one receipt a task, the challenger's."""
    try:
        found = json.loads((reports / "registered.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    several = {t: [{"challenger": True, **v}] if isinstance(v, dict) else v for t, v in found.items()}
    return {task: [r for r in receipts if isinstance(r, dict)] for task, receipts in several.items() if receipts}


def challenger_of(receipts: list[Receipt]) -> Receipt | None:
    return next((receipt for receipt in receipts if receipt.get("challenger")), None)


def value_of(reports: Path, receipt: Receipt, metric: str, split: str = "test") -> float | None:
    """The run's value of `metric` in its evaluation on this machine, on the first dataset that it has it on."""
    try:
        records = json.loads((reports / "eval" / str(receipt["run"]) / "scores.json").read_text(encoding="utf-8"))
        values = [r["value"] for r in records if r["metric"] == metric and r.get("split", split) == split]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((float(value) for value in values if value is not None), None)


def lost(params: TrackingParams, root: Path) -> list[str]:
    """The versions, such as `vlp-vqa/3`, that `register` made here and that the registry does not hold (any more): its
    database was deleted or put back to an earlier day, or their files are gone. DVC compares files and can't see it.

    Raises:
        TrackingError: MLflow does not answer.
    """
    receipts = [receipt for several in read_registered(root / "reports").values() for receipt in several]
    receipts = [receipt for receipt in receipts if receipt.keys() >= {"name", "version", "content"}]
    if not receipts or not params.uri:
        return []
    from vlp_models.registry.client import answering, connect, holds, is_there, tracking_uri

    uri = tracking_uri(params, root)
    if is_there(uri):
        client = connect(params, root)
        with answering(uri):
            receipts = [r for r in receipts if not holds(client, r["name"], int(r["version"]), r["content"])]
    return [f"{receipt['name']}/{receipt['version']}" for receipt in receipts]


SHOWN = ("metric", "value", "champion_value", "gain", "gain_low", "gain_high", "detectable", "test_uses", "budget_left")
MARK = "decisions"  # name of the page's `meta` that says which decisions it shows


def read_decisions(reports: Path) -> dict[str, dict[str, Any]]:
    """Task -> its last decision; files that are damaged are left out."""
    found = {}
    for file in sorted((reports / "promotion").glob("*.json")):
        try:
            decision = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(decision, dict):
            found[file.stem] = decision
    return found


def numbers_of(decision: dict[str, Any]) -> dict[str, Any]:
    """Those of its numbers that fit into a table."""
    numbers = decision.get("numbers")
    return {name: numbers[name] for name in SHOWN if name in numbers} if isinstance(numbers, dict) else {}


def hash_of(decisions: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]


def not_shown(reports: Path) -> bool:
    """Whether the page is there, and was made before the last decision. DVC can't see it: decisions are no outputs."""
    page = reports / "index.html"
    decisions = read_decisions(reports)
    try:
        text = page.read_text(encoding="utf-8")
    except OSError:
        return False
    mark = f'<meta name="{MARK}" content="'  # pages of earlier versions have none
    return bool(decisions) and mark in text and f'{mark}{hash_of(decisions)}">' not in text
