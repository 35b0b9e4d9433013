"""`vlp commit`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def commit(
    push: Annotated[bool, typer.Option(help="Push the data to DVC's remote, then the commit to git's.")] = True,
) -> None:
    """Commit the files of the last runs (dvc.lock, params.yaml, ledger, batches), and push them with their data.

    Other changes in the working tree stay as they are. Exit code 3: git's remote refused the branch, and the commit is
    on a branch of its own there.
    """
    from vlp_models.cli.pipeline import run_lock
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.commit.commit import REFUSED, commit_run, push_run
    from vlp_models.params import load_params

    params, workspace = load_params(), Workspace()
    with run_lock(workspace, "commit"):
        print(commit_run(params, workspace.root))
        if not push:
            return
        answer, is_refused = push_run(workspace.root)
        print(answer)
    if is_refused:
        sys.exit(REFUSED)


COMMANDS = {"Run unattended": {"commit": commit}}
WORK = {"commit": "committing and pushing"}
