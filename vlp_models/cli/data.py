"""Commands on new and unwanted data: ingest, drift, forget."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.progress import announced
from vlp_models.errors import ParamsError


def ingest(
    check: Annotated[
        bool, typer.Option("--check", help="Only list what is in the inbox and whether it is complete.")
    ] = False,
) -> None:
    """Add new image-caption pairs from the inbox to the dataset, skipping duplicates and leaked evaluation images.

    Each folder in data/inbox becomes a batch: deduplicated and checked against every evaluation split.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.ingest import run
    from vlp_models.params import load_params

    with announced("reading the inbox"):
        run(load_params(), Workspace(), check)


def drift() -> None:
    """Compare new pairs with the training data of `drift.run` (default: the first pretraining).

    Exit code 4: they differ, and `drift.gate` is true.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.drift import run
    from vlp_models.params import load_params

    report = run(load_params(), Workspace())
    raise typer.Exit(4 if report["drifted"] and report["gate"] else 0)


def croissant(
    license: Annotated[
        str, typer.Option("--license", help="License of the data: an SPDX identifier, e.g. CC-BY-4.0, or an address.")
    ],
    name: Annotated[str, typer.Option(help="The dataset's name.")] = "",
    description: Annotated[str, typer.Option(help="A sentence or two about the data.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("reports/croissant.json"),
) -> None:
    """Describe the validated data in Croissant, the metadata format of MLCommons: files, hashes, tables and columns.

    Example: `vlp croissant --license CC-BY-4.0 --name my-photos`
    """
    from vlp_models.common.io import write_json
    from vlp_models.common.workspace import Workspace
    from vlp_models.data.croissant import describe_dataset
    from vlp_models.params import load_params

    sources = ", ".join(load_params().data)
    about = description or f"Image-text data read from {sources} and validated by vlp-flows."
    found = describe_dataset(Workspace().validated, name=name or Path.cwd().name, license=license, description=about)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, found)
    print(f"{output}: version {found['version']}, {len(found['recordSet'])} tables")


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
    from vlp_models.cli.pipeline import run_lock, run_pipeline, write_plan
    from vlp_models.common.account import current_user
    from vlp_models.common.workspace import WITHDRAWN, Workspace
    from vlp_models.forgetting.forget import find_exposure, remove_aliases, withdraw_images
    from vlp_models.forgetting.report import report_json, report_lines
    from vlp_models.params import load_params

    if not (dry_run or yes or sys.stdin.isatty()):
        raise ParamsError("vlp forget: not a terminal: pass --dry-run or --yes")
    params, workspace = load_params(), Workspace()
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
        write_plan()
    if retrain:
        raise typer.Exit(run_pipeline([]))
    print("data and models stay as they are until the next `vlp run`", file=sys.stderr)
