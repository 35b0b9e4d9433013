"""`vlp pack` and `vlp replay`: figures that anybody can check."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.portable import choose_instructions
from vlp_models.errors import ParamsError


class Level(StrEnum):
    score = "score"
    predict = "predict"
    train = "train"


def pack(
    run: Annotated[str, typer.Argument(help="An evaluated fine-tuning run, such as tden-vqa.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write; default: RUN.run.zip.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="A private key (PEM; P-256, P-384 or P-521) to sign with; needs model-signing.", show_default=False
        ),
    ] = None,
    scores_only: Annotated[
        bool, typer.Option("--scores-only", help="Leave predictions out: those of retrieval contain the test captions.")
    ] = False,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="Add rounded weights and the test data, texts included: level predict then needs the file alone.",
        ),
    ] = False,
) -> None:
    """Pack what a run's figures come from into one file: scores per item, predictions, lineage, hashes, environment.

    Anybody can check it with `vlp replay`. Example: `vlp pack tden-vqa`
    """
    from vlp_models.params import load_params

    if scores_only and standalone:
        raise ParamsError("--standalone packs the test data, which --scores-only leaves out; choose one of them")
    params = load_params()
    choose_instructions(params.trainer.reproducible)  # before torch is loaded: --standalone predicts
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.bundles.pack import pack as write
    from vlp_models.contrib.bundles.run_bundle import SUFFIX, load_signer, sign

    if run not in params.finetune:
        raise ParamsError(f"no run `{run}` in params.yaml's `finetune`; known: {', '.join(params.finetune)}")
    signer = None if key is None else load_signer(key)  # before a file is written
    path = output or Path(f"{run}{SUFFIX}")
    bundle = write(params, Workspace(), run, path, predictions=not scores_only, standalone=standalone)
    print(f"{bundle.path}: {len(bundle.files)} files of {run}, id {bundle.id}")
    if signer is not None:
        print(f"{sign(bundle.path, signer)}: its signature")


def replay(
    bundle: Annotated[Path, typer.Argument(help="A file that `vlp pack` wrote.", show_default=False)],
    level: Annotated[
        Level,
        typer.Option(
            help="score: values and intervals from the scores per item, in seconds. predict: also predictions, with "
            "this project's data and weights or those of a standalone bundle. train: everything, in a copy of this "
            "project."
        ),
    ] = Level.score,
    public_key: Annotated[
        Path | None, typer.Option(help="Refuse the bundle unless this key (PEM) signed it.", show_default=False)
    ] = None,
) -> None:
    """Compute a packed run's figures again, and list what is equal and what differs. Exit code 1: something differs.

    A bundle is refused if any byte of it has changed. With `trainer.reproducible: portable`, weights are
    by design bit-identical on x86-64 processors with AVX2. Example: `vlp replay tden-vqa.run.zip --level predict`
    """
    from vlp_models.contrib.bundles.run_bundle import SCORES, check_signature, open_bundle, short_commit

    opened = open_bundle(bundle)
    if public_key is not None:
        check_signature(bundle, public_key)
    # The instruction set must be chosen before torch is loaded, which the import below does.
    choose_instructions(opened.manifest["environment"]["mode"])
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.bundles.replay import replay as compute

    commit = short_commit(opened.manifest["git_commit"])
    evaluated = ", ".join(sorted({short_commit(record["git"]) for record in opened.json(SCORES)}))
    commits = f"commit {commit}" if evaluated == commit else f"packed at commit {commit}, evaluated at {evaluated}"
    print(f"{bundle}: {opened.run} ({opened.task}), id {opened.id}, {commits}")
    findings = compute(opened, level.value, Workspace())
    for finding in findings:
        state = {True: "equal", False: "differs", None: "unchecked"}[finding.equal]
        print(f"{state:10} {finding.subject}: {finding.text}")
    raise typer.Exit(int(any(finding.equal is False for finding in findings)))


COMMANDS = {"Compare models, check figures": {"pack": pack, "replay": replay}}
WORK = {"pack": "hashing weights", "replay": "computing the figures again"}
