"""`vlp costs`."""

from __future__ import annotations

from typing import Annotated

import typer


def costs(
    weeks: Annotated[bool, typer.Option("--weeks", help="Add up by week instead of by stage.")] = False,
) -> None:
    """Show what the stages of this project have cost: processor time, memory, bytes, energy if it can be read."""
    from pathlib import Path

    from vlp_models.cli.tables import open_console, print_table
    from vlp_models.contrib.costs.costs import COLUMNS, make_table, read_costs, week_of

    rows = make_table(read_costs(Path.cwd()), week_of if weeks else lambda cost: cost.stage)
    if not rows:
        print("no stage has run here yet")
        return
    columns = {name: [row[name] for row in rows.values()] for name in COLUMNS}
    print_table(open_console(100), {"week" if weeks else "stage": list(rows), **columns}, numbers=COLUMNS)


COMMANDS = {"Compare models, check figures": {"costs": costs}}
WORK = {"costs": "adding up costs"}
