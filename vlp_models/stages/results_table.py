"""The results as a table on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp_models.stages.workspace import read_json

# What one wants to see first; the rest is in summary.json and on the page.
HEADLINES = {
    "captioning": ("CIDEr", "BLEU-4", "METEOR", "true captions"),
    "vqa": ("accuracy", "accuracy (image blanked)"),
    "nlvr": ("accuracy", "consistency", "accuracy (image blanked)"),
}


def is_headline(record: dict[str, Any]) -> bool:
    return record["metric"] in HEADLINES.get(record["task"], ())


def print_results(summary: Path) -> None:
    """Prints the main metrics of every run with interval and baselines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    records = [record for record in read_json(summary) if is_headline(record)]
    if not records:
        return
    table = Table(title="Results (percent; 95% intervals)", title_justify="left", header_style="bold")
    for name in ("run", "data", "metric"):
        table.add_column(name)
    for name in ("value", "interval"):
        table.add_column(name, justify="right")
    table.add_column("to compare with")
    before = ""
    for record in records:
        run = record["run"]
        if before and run != before:
            table.add_section()
        compared = ", ".join(f"{name} {value:.1f}" for name, value in sorted(record["baselines"].items()))
        cells = (
            "" if run == before else run,
            f"{record['dataset']} {record['split']}",
            record["metric"],
            "-" if record["value"] is None else f"{record['value']:.1f}",
            "" if record["low"] is None else f"{record['low']:.1f} to {record['high']:.1f}",
            record["note"] if record["value"] is None else compared,
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text: a name in brackets is no markup
        before = run
    Console().print(table)
