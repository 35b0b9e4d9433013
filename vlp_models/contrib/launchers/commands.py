"""`vlp join`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def join(
    index: Annotated[int, typer.Option(help="Number of this machine, from 1; each has its own.", min=1)] = 1,
) -> None:
    """Lend this machine to trainings that `vlp run` starts on another one with `trainer.launcher: torchrun`.

    Run it in the project's folder on the file system that the machines share; it goes on until Ctrl-C.
    Example: `vlp join --index 1`
    """
    from vlp_models.contrib.launchers.torchrun import join as take_part
    from vlp_models.params import load_params

    load_params()  # an error if this is not the project's folder
    take_part(Path.cwd(), index)


COMMANDS = {"Run the pipeline": {"join": join}}
WORK: dict[str, str] = {}
