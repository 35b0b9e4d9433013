"""`vlp import-checkpoint` and `vlp verify-resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.portable import choose_instructions


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
    from vlp_models.params import load_params
    from vlp_models.pipeline.import_checkpoint import import_checkpoint

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
