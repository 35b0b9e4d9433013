"""`vlp import-checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_checkpoint(
    source: Annotated[
        str, typer.Argument(help="A weights file, a folder (bert, soho-parts), package:NAME, or timm:NAME (timm).")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Whole models: xmodaler-tden, unified-vlp, vlmo, soho. Parts: bert, beit, timm (a CNN or ViT), "
            "soho-parts (a CNN, a BERT or both).",
        ),
    ],
    name: Annotated[str, typer.Option(help="The model in params.yaml; writes checkpoints/imported/NAME.")],
    task: Annotated[str, typer.Option(help="vqa or vcr, if the weights do not determine it.", show_default=False)] = "",
    heads: Annotated[
        int, typer.Option(help="xmodaler-tden: attention heads; default: one per 64 dimensions.", show_default=False)
    ] = 0,
    answers: Annotated[
        str, typer.Option(help="VQA: JSON file with the answer list, in order.", show_default=False)
    ] = "",
    max_text_len: Annotated[
        int,
        typer.Option(help="Fine-tuned models: maximum text length in training, in tokens.", show_default=False),
    ] = 0,
    max_regions: Annotated[
        int, typer.Option(help="Fine-tuned models: maximum number of regions in training.", show_default=False)
    ] = 0,
) -> None:
    """Convert public weights (of the papers' code, BERT, BEiT, timm) to a checkpoint to start from.

    Example: `vlp import-checkpoint beit_base_patch16_224_pt22k.pth --format beit --name vlmo-base`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.public_weights.import_checkpoint import import_checkpoint
    from vlp_models.params import load_params

    lines = import_checkpoint(
        form,
        Path(source),
        name,
        load_params(),
        Workspace(),
        task=task,
        heads=heads,
        answers=Path(answers) if answers else None,
        max_text_len=max_text_len,
        max_regions=max_regions,
    )
    for line in lines:
        print(line)


COMMANDS = {"Run the pipeline": {"import-checkpoint": import_checkpoint}}
WORK = {"import-checkpoint": "converting weights"}
