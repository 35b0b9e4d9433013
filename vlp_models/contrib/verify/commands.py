"""`vlp verify` and `vlp verify-resume`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from vlp_models.common.portable import choose_instructions
from vlp_models.common.redaction import redact, redacted


def verify(
    version: Annotated[str, typer.Argument(help="A task or version: vqa, vlp-vqa/3, vlp-vqa@champion.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Verify the files, code, data and scores of a registered version against its lineage.

    Exit code 1: something differs.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.verify.version import verify
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.versions import resolve_version

    params, workspace = load_params(), Workspace()
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        resolved = resolve_version(client, params.tracking, version)
        checks = verify(client, workspace, resolved)
    name = f"{resolved.name} version {resolved.version}"
    if as_json:
        print(json.dumps({"version": name, "checks": [redacted(vars(check)) for check in checks]}, indent=2))
    else:
        print(name)
        for check in checks:
            print(f"  {check.state:8} {check.subject:8} {redact(check.text)}")
    raise typer.Exit(int(any(check.state == "differs" for check in checks)))


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
    from vlp_models.contrib.verify.resume import verify_resume

    result = verify_resume(params, Workspace(), run, steps)
    print(f"{result.run}: {result.steps} updates, killed after update {result.killed_at} was saved, and resumed")
    print("\n".join(result.differ or [f"all {result.files} files of the checkpoint are bit-identical"]))
    raise typer.Exit(int(bool(result.differ)))


COMMANDS = {"Registry and promotion": {"verify": verify}, "Checks": {"verify-resume": verify_resume}}
WORK = {"verify": "checking the version's files, code and data", "verify-resume": "training twice"}
