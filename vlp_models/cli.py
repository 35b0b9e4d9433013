"""`vlp`: the command line. Imports lazily, so that `vlp --help` answers at once.

Every command reads params.yaml of the current directory. Errors a user can act on are printed alone; `--debug`
shows the traceback.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from vlp_models.errors import VLPError

app = typer.Typer(
    name="vlp",
    help="Vision-language pretraining, from raw image-text pairs to a registered model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Stage(StrEnum):
    generate = "generate"
    prepare = "prepare"
    validate = "validate"
    detector = "detector"
    features = "features"
    tokenizer = "tokenizer"
    shards = "shards"
    pretrain = "pretrain"
    finetune = "finetune"
    evaluate = "evaluate"
    register = "register"
    report = "report"


@app.command()
def stage(
    name: Annotated[Stage, typer.Argument(help="The stage, as dvc.yaml names it.")],
    key: Annotated[str, typer.Argument(help="The dataset or fine-tuning run, for stages that have several.")] = "",
    params: Annotated[str, typer.Option(help="The params file.")] = "params.yaml",
) -> None:
    """Runs one stage by itself. `dvc repro` calls this, and decides which stages need it."""
    import importlib

    from vlp_models.params import load_params
    from vlp_models.stages.workspace import Workspace

    module = importlib.import_module(f"vlp_models.stages.{name.value}")
    module.run(load_params(params), Workspace(), key)


def main() -> None:
    """Entry point: a `VLPError` is one line on stderr and its exit code."""
    try:
        app()
    except VLPError as error:
        if os.environ.get("VLP_DEBUG"):
            raise
        print(f"vlp: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
