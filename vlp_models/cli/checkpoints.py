"""`vlp verify-resume`."""

from __future__ import annotations

from typing import Annotated

import typer

from vlp_models.common.portable import choose_instructions


def verify_resume(
    run: Annotated[
        str,
        typer.Argument(
            help="pretrain/NAME or finetune/NAME; default: the first one in params.yaml.", show_default=False
        ),
    ] = "",
    steps: Annotated[int, typer.Option(help="Number of updates to train.")] = 6,
) -> None:
    """Check that a killed and resumed training is bit-identical to an uninterrupted one.

    Trains a few updates twice, once killed and resumed. Exit code 1: the results differ.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    params = load_params()
    choose_instructions(params.trainer.reproducible)
    from vlp_models.pipeline.verify_resume import verify_resume

    found = verify_resume(params, Workspace(), run, steps)
    print(f"{found.run}: {found.steps} updates, killed after update {found.killed_at} was saved, and resumed")
    print("\n".join(found.differ or [f"all {found.files} files of the checkpoint are bit-identical"]))
    raise typer.Exit(int(bool(found.differ)))
