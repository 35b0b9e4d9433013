"""Commands on new data: ingest, drift."""

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


def drift() -> None:
    """Compare new pairs with the training data of `drift.run` (default: the first pretraining).

    Exit code 4: they differ, and `drift.gate` is true.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.drift import run
    from vlp_models.params import load_params

    report = run(load_params(), Workspace())
    raise typer.Exit(4 if report["drifted"] and report["gate"] else 0)
