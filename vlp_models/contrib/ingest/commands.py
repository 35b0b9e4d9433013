"""`vlp ingest`."""

from __future__ import annotations

from typing import Annotated

import typer


def ingest(
    check: Annotated[
        bool, typer.Option("--check", help="Only list what is in the inbox and whether it is complete.")
    ] = False,
) -> None:
    """Add new image-caption pairs from the inbox to the dataset, skipping duplicates and leaked evaluation images.

    Each folder in data/inbox becomes a batch: deduplicated and checked against every evaluation split.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.ingest.ingest import run
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import measured

    workspace = Workspace()
    with measured(workspace.root, "ingest"):
        run(load_params(), workspace, check)


COMMANDS = {"New data": {"ingest": ingest}}
WORK = {"ingest": "reading the inbox"}
