"""What has happened since the last notification: decisions of the gate, a low error budget, a disk that fills up.

.work/notify.json has what the webhook has received. Decisions are read from the ledger, so those made by hand, and
those of runs that died before their end, are sent with the next run.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.redaction import redacted
from vlp_models.errors import shorten_list
from vlp_models.params import Params
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.receipts import decision_word, describe_decision

FIRST_SECONDS = 86400.0  # age of the oldest decision in a first notification
LOW_BUDGET = 0.25  # share of a task's error budget
SOON_DAYS = 30.0
MIN_DAYS = 2.0  # of measurements of the disk that a forecast needs
MAX_MEASUREMENTS = 60  # of the disk; one a day
GOOD = ("promoted", "accepted")

Event = dict[str, Any]  # event, task, subject, text, see (a command or an address), bad


class Events:
    """The events since the last notification that arrived.

    events: what to send. Only bad ones with `flow.notify: failures`.
    """

    def __init__(self, params: Params, root: Path) -> None:
        self._file = root / ".work" / "notify.json"
        sent = read_json_or_none(self._file)
        sent = sent if isinstance(sent, dict) else {}
        entries = Ledger(root / params.promotion.ledger).entries()
        events = [_decision(params, entry) for entry in _unsent(entries, sent.get("ledger", ""))]
        # A state that lasts is an event when it begins.
        budgets = {entry["model"]: left for entry in entries if (left := _budget_left(entry)) is not None}
        low = sorted(model for model, left in budgets.items() if left < LOW_BUDGET)
        events += [_low_budget(model, budgets[model]) for model in low if model not in sent.get("low", [])]
        days = forecast(root)
        is_soon = days is not None and days < SOON_DAYS
        if is_soon and not sent.get("disk"):
            events.append(_full_disk(root, days or 0.0))
        self.events: list[Event] = [redacted(event) for event in events if event["bad"] or params.flow.notify == "all"]
        self._sent = {"ledger": entries[-1]["hash"] if entries else "", "low": low, "disk": is_soon}

    def mark_sent(self) -> None:
        write_json(self._file, self._sent)


def measure_disk(root: Path) -> None:
    """Write the time and the free bytes of the project's disk to .work/disk.json, in place of an earlier one today."""
    now, earlier = time.time(), _measurements(root)
    earlier = [entry for entry in earlier if int(entry[0] // 86400) < int(now // 86400)]
    write_json(root / ".work" / "disk.json", [*earlier, [now, shutil.disk_usage(root).free]][-MAX_MEASUREMENTS:])


def _measurements(root: Path) -> list[list[float]]:
    """Return the pairs of time and free bytes, oldest first; none if the file is damaged."""
    try:
        return [[float(moment), float(free)] for moment, free in read_json_or_none(root / ".work" / "disk.json") or []]
    except (TypeError, ValueError):
        return []


def forecast(root: Path) -> float | None:
    """Return in how many days the project's disk is full, by a line through its measurements; None: it does not fill.

    Also None if the measurements span less than two days.
    """
    measured = _measurements(root)
    days = [moment / 86400 for moment, _ in measured]
    if len(days) < 3 or days[-1] - days[0] < MIN_DAYS:
        return None
    slope = statistics.linear_regression(days, [free for _, free in measured]).slope  # bytes a day
    return shutil.disk_usage(root).free / -slope if slope < 0 else None


def describe_forecast(root: Path) -> list[str]:
    """Return a line of `vlp status` if the disk will be full within a year."""
    days = forecast(root)
    return [] if days is None or days > 365 else [f"full in about {days:.0f} days, as it filled up lately"]


def _unsent(entries: list[dict[str, Any]], last: str) -> list[dict[str, Any]]:
    """Return the entries of the ledger after the one with this hash; without it those of the last day."""
    hashes = [entry["hash"] for entry in entries]
    if last in hashes:
        return entries[hashes.index(last) + 1 :]
    return [
        entry for entry in entries if time.time() - datetime.fromisoformat(entry["time"]).timestamp() < FIRST_SECONDS
    ]


def _decision(params: Params, entry: Mapping[str, Any]) -> Event:
    if entry["action"] == "forgotten":
        return _forgotten(entry)
    decision = entry.get("decision") or {}
    task, model = entry.get("task", ""), entry.get("model", "")
    event = decision_word({**decision, "action": entry["action"]})
    reasons = "; ".join(decision.get("reasons") or [])
    text = f"{task}: {describe_decision(decision)}" if decision else f"{model}: {entry['action']}"
    text += f". {reasons}" if reasons else ""
    see = f"vlp history {task}"
    if params.tracking.uri.startswith("http") and entry.get("version"):
        see = f"{params.tracking.uri.rstrip('/')}/#/models/{model}/versions/{entry['version']}"
    subject = f"{task or model} {event}"
    return {"event": event, "task": task, "subject": subject, "text": text, "see": see, "bad": event not in GOOD}


def _forgotten(entry: Mapping[str, Any]) -> Event:
    count = len(entry["images"])
    subject = f"{count} image{'s' if count != 1 else ''} forgotten"
    text = f"{subject}, by {entry['by']}; exposed: {shorten_list(list(entry['checkpoints']), 5) or 'nothing'}"
    see = "docs/guides/forgetting.md"
    return {"event": "forgotten", "task": "", "subject": subject, "text": text, "see": see, "bad": True}


def _budget_left(entry: Mapping[str, Any]) -> float | None:
    left = ((entry.get("decision") or {}).get("numbers") or {}).get("budget_left")
    return None if left is None else float(left)


def _low_budget(model: str, left: float) -> Event:
    text = (
        f"{model}: refused comparisons left {100 * left:.0f}% of the error budget, so only large gains are promoted; "
        "a new test set, or more seeds, finds smaller ones"
    )
    subject = f"{model}: error budget low"
    see = "docs/concepts/error-budget.md"
    return {"event": "budget_low", "task": "", "subject": subject, "text": text, "see": see, "bad": True}


def _full_disk(root: Path, days: float) -> Event:
    text = f"{root}: the disk is full in about {days:.0f} days, as it filled up lately"
    subject, see = f"disk full in {days:.0f} days", "docs/guides/upkeep.md"
    return {"event": "disk_full_soon", "task": "", "subject": subject, "text": text, "see": see, "bad": True}
