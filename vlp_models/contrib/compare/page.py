"""A comparison as text for the terminal, as JSON and as one HTML page without scripts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_text
from vlp_models.common.pages import page_environment
from vlp_models.contrib.compare.comparison import Comparison, Row

STYLES = {"promote": "green", "keep": "red", "inconclusive": "yellow"}


def print_comparison(comparison: Comparison) -> None:
    """Print the table, and below it what qualifies it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # Without a terminal rich assumes 80 columns, into which the table does not fit.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    confidence = f"{100 * comparison.settings.confidence:g}%"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "metric",
        "model",
        comparison.baseline,
        "its value",
        "gain",
        # Of several rows, all intervals together have this confidence.
        f"{confidence} interval" + " (joint)" * (len(comparison.rows) > 1),
        "p",
        "detectable",
        "verdict",
    ):
        is_text = name in ("metric", "model", "verdict")
        table.add_column(Text(name), justify="left" if is_text else "right", overflow="fold")
    for row in comparison.rows:
        table.add_row(*(Text(cell) for cell in cells(row)), Text(row.verdict, STYLES[row.verdict]))
    console.print(table)
    for row in comparison.rows:
        console.print(Text(f"{row.challenger}, {row.metric}: {row.verdict}: {row.reason}"))
    several = [
        f"{len(runs)} runs of {model}: {'; '.join(runs)}" for model, runs in comparison.runs.items() if len(runs) > 1
    ]
    left_out = [
        f"not compared, because other files lack them: {len(items):,} items of {source}: {', '.join(items[:5])}"
        + (", ... (all are in the JSON and on the page)" if len(items) > 5 else "")
        for source, items in comparison.left_out.items()
    ]
    for line in (*sizes(comparison), *several, *comparison.notes, *left_out):
        console.print(Text(line), style="dim")


def sizes(comparison: Comparison) -> list[str]:
    """Return the numbers of items and clusters: one line, or one for each metric that has its own."""
    counts = {row.metric: (row.items, row.clusters) for row in comparison.rows}
    lines = []
    for metric, (items, clusters) in counts.items():
        name = f"{metric}: " if len(set(counts.values())) > 1 else ""
        lines.append(f"{name}{items:,} items" + (f" in {clusters:,} clusters" if clusters != items else ""))
    # Metrics with the same numbers of items and clusters share one line.
    return list(dict.fromkeys(lines))


def cells(row: Row) -> list[str]:
    """Return the cells of a table's row, without its verdict."""
    return [
        row.metric,
        row.challenger,
        number(row.baseline_value),
        number(row.value),
        f"{row.gain:+.4g}",
        "" if row.low is None or row.high is None else f"{row.low:+.4g} to {row.high:+.4g}",
        "" if row.p_corrected is None else f"{row.p_corrected:.2g}",
        "" if row.detectable is None else number(row.detectable),
    ]


def number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def as_json(comparison: Comparison) -> str:
    return json.dumps(_finite(comparison.as_dict()), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page; never half of it."""
    low = min((row.low for row in comparison.rows if row.low is not None), default=0.0)
    high = max((row.high for row in comparison.rows if row.high is not None), default=0.0)
    # The axis always includes 0, so that the side of an interval is visible.
    low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or 1.0

    def x_of(value: float) -> float:
        """Return a gain's position on the page's axis of 220 pixels."""
        # 10 pixels of margin on either side of 200 pixels.
        return round(10 + 200 * (value - low) / span, 1)

    template = page_environment("vlp_models.contrib.compare").get_template("page.html.j2")
    write_text(path, template.render(comparison=comparison, cells=cells, x_of=x_of, sizes=sizes(comparison)))
