"""`vlp prune`."""

from __future__ import annotations

from typing import Annotated

import typer


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go, and the bytes.")] = False,
) -> None:
    """Delete what the section `retention` of params.yaml does not keep: old versions' files, old data, old submissions.

    Champions, versions with an alias and what the workspace uses stay in any case.
    """
    from vlp_models.cli.pipeline import run_lock
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.retention.params import RetentionParams
    from vlp_models.params import load_params

    params, workspace = load_params(), Workspace()
    if not params.section(RetentionParams).is_on:
        print("retention keeps everything; for example: vlp use --set retention.versions=10 --set retention.commits=10")
        return
    from vlp_models.contrib.retention.prune import prune as prune_project

    total = 0
    with run_lock(workspace, "prune"):
        for pruned in prune_project(params, workspace, dry=dry_run):
            names = f": {', '.join(pruned.names)}" if pruned.names else ""
            print(f"{pruned.kind}: {pruned.count}, {pruned.bytes / 1e6:,.1f} MB{names}")
            total += pruned.bytes
    print(f"{'would free' if dry_run else 'freed'} {total / 1e6:,.1f} MB here")


COMMANDS = {"Run unattended": {"prune": prune}}
WORK = {"prune": "deleting what is not kept"}
