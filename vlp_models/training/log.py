"""A run's record: one JSON object a line, and the same as CSV for plots.

Imports nothing that trains: Lightning takes seconds to import, and a stage that only reads a record need not wait.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
TIMING = ("seconds", "samples_per_s", "waiting_share", "reward_share", "time")  # of the machine, not of the result


def read_log(log: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; the last one may have been cut off by a kill."""
    rows = []
    if log.exists():
        for line in log.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def truncate_log(log: Path, step: int) -> list[dict[str, Any]]:
    """Drops the lines after update `step`, which a resumed run will write again; returns the others."""
    rows = [row for row in read_log(log) if row["step"] <= step]
    partial = log.with_name(f".{log.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(log)
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Step, epoch, loss, then the other columns by name; no timings, so that equal runs give equal bytes."""
    names = {name for row in rows for name in row} - {*TIMING, "step", "epoch", "loss"}
    columns = ["step", "epoch", "loss", *sorted(names)]
    lines = [",".join(columns)]
    for row in rows:
        lines.append(",".join(_cell(row.get(column)) for column in columns))
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)


def final_numbers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The last update's numbers and the last validation's (`val_...`)."""
    final: dict[str, float] = {}
    if rows:
        final |= {name: value for name, value in rows[-1].items() if name not in (*TIMING, "step", "epoch")}
    for row in reversed(rows):
        validation = {name: value for name, value in row.items() if name.startswith("val_")}
        if validation:
            return final | validation
    return final
