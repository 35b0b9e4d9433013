"""Read what registration and the gate left under reports/: registered.json and promotion/TASK.json.

Imports neither models nor torch: the flow and `vlp status` read these files on every run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vlp_models.params import TrackingParams

Receipt = dict[str, Any]
DECISIONS_META = "decisions"  # name of the report's <meta> with the hash of the decisions that it shows


def read_registered(reports: Path) -> dict[str, list[Receipt]]:
    """Return task -> its versions, best first: name, version, run, model, variant, content; `challenger` on one.

    Empty if the file is missing or damaged.
    """
    try:
        registered = json.loads((reports / "registered.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    receipts_by_task = {}
    for task, receipts in registered.items() if isinstance(registered, dict) else ():
        if isinstance(receipts, list) and receipts:
            receipts_by_task[task] = [receipt for receipt in receipts if isinstance(receipt, dict)]
    return receipts_by_task


def find_challenger(receipts: list[Receipt]) -> Receipt | None:
    return next((receipt for receipt in receipts if receipt.get("challenger")), None)


def read_value(reports: Path, receipt: Receipt, metric: str, split: str = "test") -> float | None:
    """Return the run's `metric` from its evaluation in this workspace, on the first dataset that has it."""
    try:
        records = json.loads((reports / "eval" / str(receipt["run"]) / "scores.json").read_text(encoding="utf-8"))
        values = [r["value"] for r in records if r["metric"] == metric and r.get("split", split) == split]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((float(value) for value in values if value is not None), None)


def find_lost_versions(params: TrackingParams, root: Path) -> list[str]:
    """Return the versions, e.g. `vlp-vqa/3`, that `register` made here and that the registry no longer holds.

    Its database was deleted or restored from a backup, or their files are gone. DVC compares only files, so it
    cannot notice this.

    Raises:
        TrackingError: MLflow does not answer.
    """
    receipts = [receipt for several in read_registered(root / "reports").values() for receipt in several]
    # A damaged receipt cannot be looked up, so it is skipped.
    receipts = [receipt for receipt in receipts if receipt.keys() >= {"name", "version", "content"}]
    if not receipts or not params.uri:
        return []
    from vlp_models.registry.client import (
        connect,
        database_exists,
        find_version_by_content,
        tracking_errors,
        tracking_uri,
    )

    uri = tracking_uri(params, root)
    # Without the database, all of them.
    lost = receipts
    if database_exists(uri):
        client, lost = connect(params, root), []
        with tracking_errors(uri):
            for receipt in receipts:
                name, number = receipt["name"], int(receipt["version"])
                if find_version_by_content(client, name, receipt["content"], number) is None:
                    lost.append(receipt)
    return [f"{receipt['name']}/{receipt['version']}" for receipt in lost]


def read_decisions(reports: Path) -> dict[str, dict[str, Any]]:
    """Return task -> the gate's last decision (reports/promotion/TASK.json); damaged files are skipped."""
    decisions = {}
    for file in sorted((reports / "promotion").glob("*.json")):
        try:
            decision = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(decision, dict):
            decisions[file.stem] = decision
    return decisions


def decision_word(decision: dict[str, Any]) -> str:
    """Return a decision in a word: promoted, unchanged, inconclusive (refused, but a gain is not excluded), ..."""
    is_open = decision.get("action") == "refused" and decision.get("outcome") == "inconclusive"
    return "inconclusive" if is_open else str(decision.get("action", ""))


def describe_decision(decision: dict[str, Any]) -> str:
    """Return a decision in a few words, such as `refused: version 3 (inconclusive); champion: version 2, 29.0`."""
    text = f"{decision.get('action')}: version {decision.get('version')}"
    if decision.get("action") == "promoted":
        return text + (" (forced)" if decision.get("forced") else "")
    text += f" ({decision['outcome']})" if decision.get("outcome") else ""
    value = (decision.get("numbers") or {}).get("champion_value")
    champion = f"version {decision['champion']}" if decision.get("champion") else "none"
    return f"{text}; champion: {champion}" + (f", {value:.1f}" if value is not None else "")


def hash_decisions(decisions: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]


def is_report_outdated(reports: Path) -> bool:
    """Return whether reports/index.html was made before the last decision; decisions are not DVC outputs."""
    decisions = read_decisions(reports)
    try:
        page = (reports / "index.html").read_text(encoding="utf-8")
    except OSError:
        return False
    # The report stores the hash of the decisions that it shows, so dates of files do not matter.
    return bool(decisions) and f'<meta name="{DECISIONS_META}" content="{hash_decisions(decisions)}">' not in page
