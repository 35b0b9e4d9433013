"""`vlp drift`."""

from __future__ import annotations

import typer


def drift() -> None:
    """Compare new pairs with the training data of `drift.run` (default: the first training).

    Exit code 4: they differ, and `drift.gate` is true.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.drift.new_pairs import run
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import measured

    workspace = Workspace()
    with measured(workspace.root, "drift"):
        report = run(load_params(), workspace)
    raise typer.Exit(4 if report["drifted"] and report["gate"] else 0)


COMMANDS = {"New data": {"drift": drift}}
WORK = {"drift": "comparing new pairs with the training data"}
