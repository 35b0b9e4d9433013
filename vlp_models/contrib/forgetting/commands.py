"""`vlp forget`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from vlp_models.common.progress import announced
from vlp_models.errors import ParamsError


def forget(
    images: Annotated[list[str], typer.Argument(help="Image ids (scenes/17), paths in a dataset, or image files.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    exact: Annotated[bool, typer.Option(help="Only match equal bytes or pixels, not near-duplicates.")] = False,
    keep_fingerprint: Annotated[
        bool, typer.Option(help="Keep a 32 x 32 thumbnail, to recognize cropped and rotated copies later.")
    ] = False,
    withdraw_versions: Annotated[
        bool, typer.Option(help="Remove all aliases, including champion, from versions trained on the images.")
    ] = False,
    retrain: Annotated[bool, typer.Option(help="Then run the pipeline: only affected runs are trained again.")] = False,
    by: Annotated[
        str, typer.Option(help="The name to record in the ledger; default: the current user.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """List the models trained on an image or its copies, and withdraw the images from the pipeline. No file is deleted.

    Example: `vlp forget photo.jpg --dry-run`
    """
    from vlp_models.cli.pipeline import run, run_lock, write_plan
    from vlp_models.common.user import current_user
    from vlp_models.common.workspace import WITHDRAWN, Workspace
    from vlp_models.contrib.forgetting.forget import find_exposure, remove_aliases, withdraw_images
    from vlp_models.contrib.forgetting.report import report_json, report_lines
    from vlp_models.params import load_params

    if not (dry_run or yes or sys.stdin.isatty()):
        raise ParamsError("vlp forget: not a terminal: pass --dry-run or --yes")
    params, workspace = load_params(), Workspace()
    # A dry run writes nothing, so it need not wait for a running pipeline.
    with nullcontext() if dry_run else run_lock(workspace, "forget"):
        with announced("searching data and models for the images"):
            report = find_exposure(params, workspace, images, exact=exact)
        if as_json:
            print(json.dumps(report_json(report, params), indent=2, ensure_ascii=False))
        else:
            print("\n".join(report_lines(report, params, workspace)))
        if dry_run:
            return
        if not (yes or typer.confirm("Withdraw these images? Their files stay.")):
            print("nothing changed", file=sys.stderr)
            raise typer.Exit(1)
        new = withdraw_images(params, workspace, report, keep_fingerprint=keep_fingerprint, by=by or current_user())
        print(f"{WITHDRAWN}: {new} new entries; commit it with `git add {WITHDRAWN} dvc.yaml`", file=sys.stderr)
        for line in remove_aliases(params, workspace, report, by=by or current_user()) if withdraw_versions else ():
            print(line, file=sys.stderr)
        write_plan(load_params(), workspace)
    if retrain:
        run()
    print("data and models stay as they are until the next `vlp run`", file=sys.stderr)


COMMANDS = {"New data": {"forget": forget}}
WORK: dict[str, str] = {}
