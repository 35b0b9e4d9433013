"""The command on new data: ingest."""

from __future__ import annotations

from typing import Annotated

import typer

from vlp_models.common.progress import announced


def ingest(
    check: Annotated[
        bool, typer.Option("--check", help="Only list what is in the inbox and whether it is complete.")
    ] = False,
) -> None:
    """Add new image-caption pairs from the inbox to the dataset, skipping duplicates and leaked evaluation images.

    Each folder in data/inbox becomes a batch: deduplicated and checked against every evaluation split.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.ingest import run
    from vlp_models.params import load_params

    with announced("reading the inbox"):
        run(load_params(), Workspace(), check)
