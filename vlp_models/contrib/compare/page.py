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


def print_comparison(found: Comparison) -> None:
    """Print the table, and below it what qualifies it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    confidence = f"{100 * found.settings.confidence:g}%"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "metric",
        "model",
        found.baseline,
        "its value",
        "gain",
        f"{confidence} interval",
        "p",
        "detectable",
        "verdict",
    ):
        right = name not in ("metric", "model", "verdict")
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*(Text(cell) for cell in cells(row)), Text(row.verdict, STYLES[row.verdict]))
    console.print(table)
    for row in found.rows:
        console.print(Text(f"{row.challenger}, {row.metric}: {row.verdict}: {row.reason}"))
    for line in (*sizes(found), *runs(found)):
        console.print(Text(line), style="dim")
    for line in (*found.notes, *left_out(found)):
        console.print(Text(line), style="dim")


def sizes(found: Comparison) -> list[str]:
    """Return the numbers of items and clusters: one line, or one for each metric that has its own."""
    own = {row.metric: (row.items, row.clusters) for row in found.rows}
    one = len(set(own.values())) == 1
    lines = [
        f"{'' if one else f'{metric}: '}{items:,} items" + (f" in {clusters:,} clusters" if clusters != items else "")
        for metric, (items, clusters) in own.items()
    ]
    return list(dict.fromkeys(lines))


def runs(found: Comparison) -> list[str]:
    """Return the runs of each model that has several."""
    return [f"{len(own)} runs of {model}: {'; '.join(own)}" for model, own in found.runs.items() if len(own) > 1]


def cells(row: Row) -> list[str]:
    """Return what a table shows of a row, but for its verdict."""
    return [
        row.metric,
        row.challenger,
        number(row.baseline_value),
        number(row.value),
        f"{row.gain:+.4g}",
        "" if row.low is None or row.high is None else f"{row.low:+.4g} to {row.high:+.4g}",
        "" if row.p_holm is None else f"{row.p_holm:.2g}",
        "" if row.detectable is None else number(row.detectable),
    ]


def number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def left_out(found: Comparison) -> list[str]:
    """Return a line for each file that has items which others lack."""
    return [
        f"not compared, because other files lack them: {len(items):,} items of {source}: {', '.join(items[:5])}"
        + (", ... (all are in the JSON and on the page)" if len(items) > 5 else "")
        for source, items in found.left_out.items()
    ]


def as_json(found: Comparison) -> str:
    return json.dumps(_finite(found.as_dict()), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(found: Comparison, path: Path) -> None:
    """Write the page; never half of it."""
    low = min((row.low for row in found.rows if row.low is not None), default=0.0)
    high = max((row.high for row in found.rows if row.high is not None), default=0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or 1.0

    def place(value: float) -> float:
        return round(10 + 200 * (value - low) / span, 1)

    template = page_environment("vlp_models.contrib.compare").get_template("page.html.j2")
    write_text(path, template.render(found=found, cells=cells, place=place, sizes=sizes(found)))
