"""The gate's last decision on each task (reports/promotion/TASK.json), for the report and the flow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

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
