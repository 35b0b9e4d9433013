"""Commands on registered versions: promote, rollback, history, evaluate-alias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vlp_models.common.plugins import Table, import_target
from vlp_models.common.portable import choose_instructions
from vlp_models.tasks import TASKS

Task = Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}.")]
User = Annotated[
    str, typer.Option(help="The name to record in the ledger; default: the current user.", show_default=False)
]

# name -> `module:function` of the project's folder and a task's entries: sentences below `vlp history`
HISTORY_NOTES = Table("history_notes", {})
WIDE = 110  # characters that all columns of the history need
STYLES = {"promoted": "green", "rolled back": "yellow", "withdrawn": "yellow", "refused": "red"}


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
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promotion_commands import history_rows

    entries = history_rows(load_params(), Workspace(), task)
    if as_json:
        for entry in entries:
            print(json.dumps(entry, sort_keys=True, ensure_ascii=False))
    elif entries:
        print_history(entries)
        for target in HISTORY_NOTES.values():
            for note in import_target(target)(Path.cwd(), entries):
                print(note)
    else:
        print("no decision yet")


def print_history(entries: list[dict[str, Any]]) -> None:
    """Print a task's ledger entries as a table, with the reasons of each below it."""
    from rich.text import Text

    from vlp_models.cli.tables import open_console, print_table

    console = open_console(WIDE)
    # The entry of a withdrawal, for example, has no decision.
    decisions = [entry.get("decision", {}) for entry in entries]
    numbers = [decision.get("numbers", {}) for decision in decisions]
    columns = {
        "line": [str(entry["seq"]) for entry in entries],
        "time (UTC)": [entry["time"][:16].replace("T", " ") for entry in entries],
        "action": [Text(describe_action(entry), STYLES.get(entry["action"], "")) for entry in entries],
        "version": [str(entry["version"] or "") for entry in entries],
        "run": [entry.get("run", "") for entry in entries],
        "model": [entry.get("run_model", "") for entry in entries],
        "before": [str(entry["from"] or "") for entry in entries],
        "value": [f"{values['value']:.2f}" if "value" in values else "" for values in numbers],
        "gain": [f"{values['gain']:+.2f}" if "gain" in values else "" for values in numbers],
        "by": [entry["by"] for entry in entries],
    }
    if console.width < WIDE:  # rich would leave out the last columns
        del columns["model"], columns["before"]
    print_table(console, columns, folded=("action", "run", "model", "by"))
    for entry, decision in zip(entries, decisions, strict=True):
        for reason in decision.get("reasons", []):
            console.print(Text(f"line {entry['seq']}: {reason}"))
        if decision.get("force_reason"):
            console.print(Text(f"line {entry['seq']}: forced: {decision['force_reason']}"))


def describe_action(entry: dict[str, Any]) -> str:
    """Return what a ledger entry did, in a few words."""
    action, decision = entry["action"], entry.get("decision", {})
    if action == "forgotten":
        count = len(entry.get("images", []))
        return "forgot 1 image" if count == 1 else f"forgot {count} images"
    if action == "refused" and decision.get("outcome"):
        return f"refused: {decision['outcome']}"
    return f"{action} (forced)" if decision.get("forced") else str(action)


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
