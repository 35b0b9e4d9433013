"""`vlp judge`."""

from __future__ import annotations

from typing import Annotated

import typer

from vlp_models.cli.predict import Model, print_predictions
from vlp_models.errors import ParamsError


def judge(
    images: Annotated[list[str], typer.Argument(help="One image file, or two: left and right.")],
    statement: Annotated[str, typer.Argument(help="A statement about the image or the pair, in quotes.")],
    model: Model = "",
) -> None:
    """Judge whether a statement about one image (NLVR) or two (NLVR2) is true."""
    from vlp_models.tasks import task_class

    task = "nlvr" if len(images) == 1 else "nlvr2"
    request = task_class(task).request
    if request is None or len(images) != request.images:
        raise ParamsError(f"vlp judge: got {len(images)} images; a statement is about one or two")
    print_predictions(task, images, statement, model)


COMMANDS = {"Use a model": {"judge": judge}}
WORK = {"judge": "loading the model"}
