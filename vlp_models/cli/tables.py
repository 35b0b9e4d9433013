"""Tables and labeled lines on the terminal, as `vlp run`, `vlp status` and `vlp history` print them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

MIN_WIDTH = 8  # characters of a column whose cells may be broken over lines


def open_console(width: int = 80) -> Console:
    """Return the terminal. A log file has no width, and rich would assume 80: it gets at least this one."""
    console = Console()
    # rich reads COLUMNS itself.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, width)
    return console


def print_line(console: Console, label: str, text: str, *, style: str = "") -> None:
    """Print a line behind its label."""
    console.print(Text(f"{label:10}", style), Text(text))  # Text: brackets in a name are not markup


def print_table(
    console: Console,
    columns: Mapping[str, Sequence[str | Text]],
    *,
    title: str = "",
    numbers: Collection[str] = (),
    folded: Collection[str] = (),
) -> None:
    """Print the columns that have any content.

    Args:
        columns: name -> cells, one per row.
        numbers: columns that are aligned on the right.
        folded: columns whose cells are broken over lines if the terminal is narrow.
    """
    table = Table(
        title=Text(title, "bold") if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    # A column without any content, such as intervals of few items, is left out.
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    for name in filled:
        table.add_column(
            name,
            justify="right" if name in numbers else "left",
            overflow="fold",
            # Numbers must not be broken over lines; on a narrow terminal a folded column shrinks instead.
            no_wrap=name not in folded,
            min_width=MIN_WIDTH if name in folded else None,
        )
    for row in zip(*filled.values(), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table)
