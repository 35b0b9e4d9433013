"""`vlp audit`."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import Annotated

import typer

LABELS = {
    "swapped": "captions that fit other images better",
    "empty": "captions without content",
    "copied": "captions on unusually many images",
    "language": "captions in another language",
    "near_duplicate": "captions of near-duplicate training images",
}


def audit(
    dataset: Annotated[str, typer.Argument(help="A dataset of params.yaml; default: all.", show_default=False)] = "",
    top: Annotated[int, typer.Option(min=0, help="Pairs to print.")] = 20,
    html: Annotated[bool, typer.Option("--html", help="Then serve a page to accept or remove the pairs.")] = False,
    page_only: Annotated[bool, typer.Option("--page-only", help="Serve the page of the last audit.")] = False,
    tower: Annotated[
        str,
        typer.Option(help="Also score by a model with two towers: finetune/RUN, pretrain/RUN or a name of `models`."),
    ] = "",
    near_duplicates: Annotated[bool, typer.Option(help="Also list near-duplicates among the training images.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds and comparisons.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the page; default: localhost only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = 7862,
) -> None:
    """List pairs whose caption does not fit: swapped, empty, copied, in another language; and copies of images.

    Example: `vlp audit pairs --html`, then `vlp run`: `validate` quarantines what was removed.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.audit.decisions import DECISIONS, REPORT, read_decisions, read_lines
    from vlp_models.errors import DataError, ParamsError
    from vlp_models.params import load_params
    from vlp_models.params.schema import suggestion

    params, workspace = load_params(), Workspace()
    if dataset and dataset not in params.data:
        raise ParamsError(f"vlp audit: no dataset {dataset} in params.yaml{suggestion(dataset, params.data)}")
    report = workspace.root / REPORT
    if page_only and not report.exists():
        raise DataError(f"{report}: not found; run `vlp audit` first")
    if not page_only:
        from vlp_models.common.device import pick_device
        from vlp_models.contrib.audit.audit import audit as run
        from vlp_models.contrib.audit.vectors import resolve_tower

        summary = run(
            params,
            workspace,
            [dataset] if dataset else list(params.data),
            seed=seed,
            tower=resolve_tower(tower, params) if tower else "",
            near_duplicates=near_duplicates,
            device=pick_device(params.trainer.accelerator, params.trainer.torch_threads),
        )
        print(f"{summary.pairs:,} captions of {summary.images:,} images; {summary.listed:,} listed in {REPORT}")
        if summary.share is not None:
            print(f"about {summary.share:.1%} of the captions belong to other images (estimated)")
        for kind, label in LABELS.items():
            if kind in summary.counts:
                print(f"  {summary.counts[kind]:,} {label}")
        for row in islice(read_lines(report), top):
            reasons = "; ".join(finding["reason"] for finding in row["findings"])
            print(f"{row['rank']:>4}  {row['score']:.3f}  {row['image_id']}: {row['text']!r:.100}  ({reasons})")
            if row["better"]:
                print(f"{'':13}fits better: {row['better']!r:.100}")
    if decided := Counter(read_decisions(workspace.root / DECISIONS).values()):
        print(f"{DECISIONS}: {decided['remove']:,} removed, {decided['accept']:,} accepted")
    if html or page_only:
        from vlp_models.contrib.audit.page import serving
        from vlp_models.pipeline.guard import stopped_by_signals

        # Ctrl-C is the usual end, with exit code 0; SIGTERM closes the page as well, with 143.
        with (
            stopped_by_signals("vlp audit", announce=False),
            serving(workspace, host=host, port=port) as address,
            suppress(KeyboardInterrupt),  # also one that is sent as soon as the address is printed
        ):
            print(f"the page is at {address}\npress Ctrl-C to stop", flush=True)
            threading.Event().wait()


COMMANDS = {"New data": {"audit": audit}}
WORK: dict[str, str] = {}
