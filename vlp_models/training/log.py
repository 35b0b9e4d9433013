"""A run's curve: one JSON object per line while it trains, and as CSV for plots.

Imports nothing that trains: Lightning takes seconds to import, and a stage that only reads a log need not wait for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_text

LOG = "log.jsonl"
TIMING = ("seconds", "samples_per_s", "waiting_share", "reward_share", "time")  # depend on the machine


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; a kill may have cut off the last one."""
    rows = []
    if log.exists():
        # The last element is empty, or a line without a line break that a kill cut off.
        for line in log.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def truncate_log(log: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after update `step`, which a resumed run writes again; return the others."""
    rows = [row for row in read_log(log) if row["step"] <= step]
    write_text(log, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Return step, epoch, loss, then the other columns by name; no timings, so that equal runs give equal bytes."""
    names = {name for row in rows for name in row} - {*TIMING, "step", "epoch", "loss"}
    columns = ["step", "epoch", "loss", *sorted(names)]

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.7g}" if isinstance(value, float) else str(value)

    lines = [",".join(columns)]
    for row in rows:
        lines.append(",".join(cell(row.get(column)) for column in columns))
    return "\n".join(lines) + "\n"


def final_numbers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last update's numbers and the last validation's (`val_...`)."""
    final: dict[str, float] = {}
    if rows:
        final |= {name: value for name, value in rows[-1].items() if name not in (*TIMING, "step", "epoch")}
    for row in reversed(rows):
        validation = {name: value for name, value in row.items() if name.startswith("val_")}
        if validation:
            return final | validation
    return final
