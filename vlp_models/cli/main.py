"""`vlp`: the command line.

Every command reads params.yaml in the current directory. Commands import what they need when they run, so that
`vlp --help` answers at once. Errors that a user can fix are printed without a traceback; VLP_DEBUG=1 shows it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from vlp_models.cli import (
    pipeline,
    predict,
    project,
    registry,
    status,
)
from vlp_models.common.environment import restart_plainly, settle_environment
from vlp_models.common.log import configure_logging, steady_output
from vlp_models.common.packages import PIPELINE, explain_missing_module, own_version
from vlp_models.common.plugins import contrib_folders
from vlp_models.common.progress import announced
from vlp_models.common.redaction import redact
from vlp_models.errors import (
    MissingToolError,
    TrackingError,
    VLPError,
    explain_system_error,
    find_exhausted,
    find_refusal,
    is_disk_full,
    path_of,
    plain_text,
)

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Make a project": {
        "init": project.init,
    },
    "Run the pipeline": {
        "run": pipeline.run,
        "use": pipeline.use,
        "plan": pipeline.plan,
        "status": status.print_status,
        "stage": pipeline.stage,
    },
    "Use a model": {
        "caption": predict.caption,
        "answer": predict.answer,
        "predict": predict.predict,
    },
    "Registry and promotion": {
        "promote": registry.promote,
        "rollback": registry.rollback,
        "history": registry.history,
        "evaluate-alias": registry.evaluate_alias,
    },
}

# What commands that may be silent for seconds say on a terminal. The others report their own progress.
WORK = {
    "init": "writing the project",
    "use": "checking params.yaml",
    "plan": "checking params.yaml",
    "status": "comparing the workspace with dvc.lock",
    "caption": "loading the model",
    "answer": "loading the model",
    "predict": "loading the model",
    "promote": "comparing registered versions",
    "rollback": "reading the registry",
    "history": "checking the ledger",
    "evaluate-alias": "loading the model",
}


app = typer.Typer(
    name="vlp",
    help="Unattended vision-language pretraining: from raw image-text pairs to a registered model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    # typer has `--help` only.
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(is_set: bool) -> None:
    if is_set:
        print(f"vlp-flows {own_version()}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def add_commands(panels: Mapping[str, Mapping[str, Callable[..., None]]], work: Mapping[str, str]) -> None:
    """Add commands to `vlp`: panel of the help -> name -> function."""
    for panel, commands in panels.items():
        for name, command in commands.items():
            # A command without an entry in `work` reports its own progress.
            is_silent = name in work
            app.command(name, rich_help_panel=panel)(announced(work[name])(command) if is_silent else command)


add_commands(COMMANDS, WORK)
# Commands of contrib come last, in the panels that their modules name.
for folder in contrib_folders():
    commands_module = f"vlp_models.contrib.{folder}.commands"
    if importlib.util.find_spec(commands_module):
        contrib = importlib.import_module(commands_module)
        add_commands(contrib.COMMANDS, contrib.WORK)


def main() -> None:
    """Run a command. A `VLPError` is one line on stderr and its exit code."""
    restart_plainly()
    configure_logging()
    settle_environment()
    steady_output()
    try:
        app()
    except VLPError as error:
        if os.environ.get("VLP_DEBUG"):
            _print_traceback()
        else:
            print(f"vlp: {redact(_explain(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        # Only modules of the extra `pipeline` may be missing; any other one is a bug.
        if os.environ.get("VLP_DEBUG") or (error.name or "").partition(".")[0] not in PIPELINE:
            _print_traceback()
            sys.exit(1)
        print(f"vlp: this needs {explain_missing_module(error.name or '')}", file=sys.stderr)
        sys.exit(MissingToolError.exit_code)
    except Exception as error:
        # A full disk, or a path that the system refuses, is not a bug: one line. Everything else has a traceback.
        # A full disk may be inside an error of another library, so it is looked for in the whole chain.
        is_full = is_disk_full(error)
        exhausted = find_exhausted(error)
        is_system_error = isinstance(error, OSError) and error.errno is not None and bool(path_of(error))
        if not (is_full or is_system_error or exhausted) or os.environ.get("VLP_DEBUG"):
            _print_traceback()
            sys.exit(1)
        way_out = ". Finished stages are kept; run the same command again" if is_full else ""
        print(f"vlp: {redact(explain_system_error(exhausted or error))}{way_out}", file=sys.stderr)
        # The flow recognizes a full disk by this code (flows/process.py).
        sys.exit(os.EX_IOERR if is_full else VLPError.exit_code)


def _explain(error: VLPError) -> str:
    """Return the error's message, or the refusal of the operating system that a reader took for damage."""
    # A reader calls a file that it may not read damaged, so the system's refusal is the better message.
    refusal = find_refusal(error)
    if refusal is not None and not isinstance(error, TrackingError):
        return explain_system_error(refusal)
    return plain_text(str(error))


def _print_traceback() -> None:
    import traceback

    print(redact(traceback.format_exc()), file=sys.stderr, end="")


if __name__ == "__main__":
    main()
