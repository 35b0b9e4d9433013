"""Commands on registered versions: promote, rollback, history, lineage, evaluate-alias."""

from __future__ import annotations

from typing import Annotated

import typer

from vlp_models.common.portable import choose_instructions
from vlp_models.tasks import TASKS

Task = Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}.")]
User = Annotated[
    str, typer.Option(help="The name to record in the ledger; default: the current user.", show_default=False)
]


def promote(
    task: Task,
    version: Annotated[
        int, typer.Option(help="The version to promote; default: the best of all runs.", show_default=False)
    ] = 0,
    force: Annotated[
        str | None,
        typer.Option(
            help="Accept a first champion that the gate refuses, for this reason, which the ledger records.",
            show_default=False,
        ),
    ] = None,
    by: User = "",
) -> None:
    """Promote the best of a task's newest versions, or `--version N`, if it passes the gate.

    Exit code 3: refused; the reasons are printed. Example: `vlp promote vqa`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    params = load_params()
    # Before NumPy is imported, which reads the instructions to use from the environment.
    choose_instructions(params.trainer.reproducible)  # a champion may have to be scored again
    from vlp_models.pipeline.promotion_commands import REFUSED, explain, promote_task

    # 0 stands for no `--version`.
    decision = promote_task(params, Workspace(), task, version=version or None, force=force, by=by)
    print("\n".join(explain(decision)))
    raise typer.Exit(REFUSED if decision.action == "refused" else 0)


def rollback(
    task: Task,
    champion: Annotated[
        int,
        typer.Option(
            "--from",
            help="Roll back this version; nothing is done if it was rolled back before, so this may be repeated.",
            show_default=False,
        ),
    ] = 0,
    by: User = "",
) -> None:
    """Restore the previous champion.

    The rolled-back version can only be promoted again with `--version N`. Example: `vlp rollback vqa --from 3`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promotion_commands import explain, rollback_task

    decision = rollback_task(load_params(), Workspace(), task, champion_now=champion or None, by=by)
    print("\n".join(explain(decision)))


def history(
    task: Task,
    as_json: Annotated[bool, typer.Option("--json", help="Print the entries as JSON lines.")] = False,
) -> None:
    """List every promotion decision of a task, and verify the ledger."""
    from vlp_models.cli.versions import print_history
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promotion_commands import history_rows

    print_history(history_rows(load_params(), Workspace(), task), as_json=as_json)


def lineage(
    model: Annotated[str, typer.Argument(help="A task or version: vqa, vlp-vqa@challenger, vlp-vqa/3.")],
    file: Annotated[str, typer.Option(help="Print a file stored with the version instead, e.g. params.yaml.")] = "",
    hashes: Annotated[bool, typer.Option("--hashes", help="Also print the hashes of all inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show the scores, data, code and parents of a registered version, and how to rebuild it.

    Example: `vlp lineage vlp-vqa@champion`
    """
    from vlp_models.cli.versions import print_lineage
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    print_lineage(load_params(), Workspace(), model, file=file, as_json=as_json, hashes=hashes)


def evaluate_alias(
    task: Task,
    alias: Annotated[str, typer.Argument(help="champion, challenger or previous.")] = "champion",
) -> None:
    """Evaluate a registered model on the current test split; writes to reports/aliases/."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    params = load_params()
    choose_instructions(params.trainer.reproducible)
    from vlp_models.pipeline.reevaluate import evaluate_alias
    from vlp_models.registry.client import mlflow_errors

    with mlflow_errors(params):
        evaluate_alias(params, Workspace(), task, alias)
