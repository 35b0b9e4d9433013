"""The results as a table on the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.data.tables import SPLITS


def is_headline(record: dict[str, Any]) -> bool:
    """Whether a record is what one wants to see first; the rest is in summary.json and on the page."""
    from vlp_models.tasks import TASKS, task_class

    return record["task"] in TASKS and record["metric"] in task_class(record["task"]).headlines


def _unseen(record: dict[str, Any]) -> str:
    """The value on items whose picture and sentences were not there to learn from."""
    figure = (record.get("seen") or {}).get("without_both")
    return "" if figure is None else f"{figure['value']:.1f}"


def without(figure: dict[str, Any] | None) -> str:
    """A score without what was seen, its interval and what is left of the items."""
    if figure is None:
        return "too few left"
    ends = "" if figure["low"] is None else f" ({figure['low']:.1f} to {figure['high']:.1f})"
    return f"{figure['value']:.1f}{ends}, {figure['n']:,} items"


def print_results(summary: Path) -> None:
    """Prints the main metrics of every run, in percent, with interval and baselines: one table a task and dataset, so
    that runs of all models stand below each other. Of a dataset that was scored on several splits, the last one; the
    others are on the page."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a log has no width of its own; rich would take 80
    places: dict[str, list[dict[str, Any]]] = {}
    for record in _of_last_splits([record for record in read_json(summary) if is_headline(record)]):
        places.setdefault(f"{record['task']}: {record['dataset']} {record['split']}", []).append(record)
    for place, records in places.items():
        order = list(dict.fromkeys(record["metric"] for record in records))
        records.sort(key=lambda record: order.index(record["metric"]))
        table = Table(title=Text(place, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("metric", overflow="fold")
        table.add_column("run", overflow="fold")
        table.add_column("model", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True, min_width=5)
        table.add_column("95% interval", no_wrap=True, min_width=14)
        table.add_column("to compare with", overflow="fold")
        if any(map(_unseen, records)):
            table.add_column("unseen", justify="right", no_wrap=True)
        for record in records:
            compared = "\n".join(f"{name} {value:.1f}" for name, value in sorted(record["baselines"].items()))
            cells = [
                record["metric"],
                record["run"],
                record["model"],
                "-" if record["value"] is None else f"{record['value']:.1f}",
                "" if record["low"] is None else f"{record['low']:.1f} to {record['high']:.1f}",
                record["note"] if record["value"] is None else compared,
                _unseen(record),
            ]
            shown = cells[: len(table.columns)]
            table.add_row(*(Text(cell) for cell in shown))  # Text: a name in brackets is no markup
        console.print(table)


def _of_last_splits(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of test, where a task's dataset was scored on val as well: what runs were chosen on is no result."""
    last: dict[tuple[str, str], str] = {}
    for record in records:
        place = record["task"], record["dataset"]
        last[place] = max(last.get(place, record["split"]), record["split"], key=SPLITS.index)
    return [record for record in records if record["split"] == last[record["task"], record["dataset"]]]
