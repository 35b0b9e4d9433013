"""`vlp`: the command line.

Every command reads params.yaml in the current directory. Commands import what they need when they run, so that
`vlp --help` answers at once. Errors that a user can fix are printed without a traceback; VLP_DEBUG=1 shows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from vlp_models.cli import checkpoints, data, demo, doctor, pipeline, predict, registry, status
from vlp_models.common.log import configure_logging
from vlp_models.common.redaction import redact
from vlp_models.errors import VLPError, is_disk_full

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run the pipeline": {
        "run": pipeline.run,
        "use": pipeline.use,
        "plan": pipeline.plan,
        "status": status.print_status,
        "stage": pipeline.stage,
        "import-checkpoint": checkpoints.import_checkpoint,
    },
    "New data": {
        "ingest": data.ingest,
        "drift": data.drift,
        "forget": data.forget,
    },
    "Use a model": {
        "demo": demo.demo,
        "caption": predict.caption,
        "answer": predict.answer,
        "judge": predict.judge,
        "predict": predict.predict,
    },
    "Registry and promotion": {
        "promote": registry.promote,
        "rollback": registry.rollback,
        "history": registry.history,
        "lineage": registry.lineage,
        "verify": registry.verify,
        "evaluate-alias": registry.evaluate_alias,
    },
    "Checks": {
        "doctor": doctor.print_findings,
        "verify-resume": checkpoints.verify_resume,
    },
}

app = typer.Typer(
    name="vlp",
    help="Unattended vision-language pretraining: from raw image-text pairs to a registered model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)


def main() -> None:
    """Run a command. A `VLPError` is one line on stderr and its exit code."""
    for tool in ("DVC_NO_ANALYTICS", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(tool, "true")
    # Threads that wait actively slow each other down tenfold once there are more of them than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging()
    try:
        app()
    except VLPError as error:
        if os.environ.get("VLP_DEBUG"):
            _print_traceback()
        else:
            print(f"vlp: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if not is_disk_full(error) or os.environ.get("VLP_DEBUG"):
            _print_traceback()
            sys.exit(1)
        print(
            f"vlp: the disk is full ({redact(str(error))}). Finished stages are kept: free some space, then run the "
            "same command again",
            file=sys.stderr,
        )
        sys.exit(os.EX_IOERR)


def _print_traceback() -> None:
    import traceback

    print(redact(traceback.format_exc()), file=sys.stderr, end="")


if __name__ == "__main__":
    main()
