"""`vlp`: the command line. Imports lazily, so that `vlp --help` answers at once.

Every command reads params.yaml of the current directory. Errors a user can act on are printed alone; VLP_DEBUG=1
shows the traceback.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.redaction import redact
from vlp_models.errors import ParamsError, VLPError, is_disk_full
from vlp_models.tasks import TASKS

OneTask = Annotated[str, typer.Argument(help=f"A task: {', '.join(TASKS)}.")]
Registered = Annotated[
    str,
    typer.Option(help="A registered model, or a version of it: vlp-vqa/3, vlp-vqa@challenger. Default: the champion."),
]
Asker = Annotated[str, typer.Option(help="Who asks, for the ledger; default: the user's name.")]

app = typer.Typer(
    name="vlp",
    help="Vision-language pretraining, from raw image-text pairs to a registered model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Stage(StrEnum):
    plan = "plan"
    generate = "generate"
    prepare = "prepare"
    validate = "validate"
    detector = "detector"
    features = "features"
    tokenizer = "tokenizer"
    shards = "shards"
    initial = "initial"
    pretrain = "pretrain"
    training_stats = "training_stats"
    finetune = "finetune"
    augment = "augment"
    evaluate = "evaluate"
    register = "register"
    report = "report"


@app.command()
def stage(
    name: Annotated[Stage, typer.Argument(help="The stage, as dvc.yaml names it.")],
    key: Annotated[str, typer.Argument(help="The dataset, model or run, for stages that have several.")] = "",
    params: Annotated[str, typer.Option(help="The params file.")] = "params.yaml",
) -> None:
    """Runs one stage by itself. `dvc repro` calls this, and decides which stages need it."""
    from vlp_models.cli.run import run_stage

    run_stage(name.value, key, params)


@app.command()
def run(
    targets: Annotated[list[str] | None, typer.Argument(help="DVC stages to bring up to date; default: all.")] = None,
) -> None:
    """Brings the whole pipeline up to date (`dvc repro`), then shows the results."""
    from vlp_models.cli.run import run_pipeline

    raise typer.Exit(run_pipeline(targets or []))


@app.command()
def use(
    preset: Annotated[str, typer.Argument(help="A preset to merge into params.yaml, e.g. presets/nlvr.yaml.")] = "",
    assign: Annotated[list[str] | None, typer.Option("--set", "-S", help="`key.path=value`, after the preset.")] = None,
) -> None:
    """Edits params.yaml (a preset, single values), checked before it is written, then dvc.yaml. Comments stay."""
    from vlp_models.cli.presets import apply_overlay
    from vlp_models.cli.run import write_plan

    for line in apply_overlay(Path("params.yaml"), Path(preset) if preset else None, assign or []):
        print(line)
    if write_plan():
        print("dvc.yaml: written anew")


@app.command()
def plan() -> None:
    """Checks params.yaml and writes dvc.yaml from it: after a model, run or dataset was added by hand."""
    from vlp_models.cli.run import write_plan

    print("dvc.yaml: written anew" if write_plan() else "dvc.yaml: as it should be")


@app.command()
def ingest(
    check: Annotated[bool, typer.Option("--check", help="Only look: what lies there, is it finished?")] = False,
) -> None:
    """Takes in what was dropped: deduplicated, checked against every evaluation split, added to the dataset."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.ingest import run as take_in
    from vlp_models.params import load_params

    take_in(load_params(), Workspace(), check)


@app.command()
def drift() -> None:
    """Compares new pairs with those the model was trained on. Exit code 4: they differ, and `drift.gate` is set."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.ingest.drift import run as compare
    from vlp_models.params import load_params

    report = compare(load_params(), Workspace())
    raise typer.Exit(4 if report["drifted"] and report["gate"] else 0)


@app.command()
def forget(
    images: Annotated[list[str], typer.Argument(help="Ids (scenes/17), paths in a dataset, or picture files.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say who saw them, and what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    exact: Annotated[bool, typer.Option(help="Copies are equal bytes or pixels only.")] = False,
    keep_print: Annotated[
        bool, typer.Option(help="Keep a print, 32 x 32, by which cropped and tilted copies are known later.")
    ] = False,
    withdraw_versions: Annotated[
        bool, typer.Option(help="Take all aliases, champion too, off the versions that saw them.")
    ] = False,
    retrain: Annotated[bool, typer.Option(help="Make again what saw them (`vlp run`); the rest stays.")] = False,
    by: Asker = "",
    as_json: Annotated[bool, typer.Option("--json", help="What was found, as JSON.")] = False,
) -> None:
    """Says which models saw pictures or copies of them, and takes the pictures out of the data for good."""
    from vlp_models.cli.run import forget as forget_pictures

    if not (dry_run or yes or sys.stdin.isatty()):
        raise ParamsError("vlp forget: nobody is there to be asked; give --dry-run, or --yes")
    code = forget_pictures(
        images,
        dry_run=dry_run,
        sure=lambda: yes or typer.confirm("Take these pictures out of the data for good?"),
        exact=exact,
        keep_print=keep_print,
        aliases=withdraw_versions,
        retrain=retrain,
        by=by,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def caption(
    images: Annotated[list[str], typer.Argument(help="Image files.")],
    model: Registered = "",
) -> None:
    """Captions images with the champion."""
    from vlp_models.cli.run import predict

    for path, prediction in zip(images, predict("captioning", images, None, model), strict=True):
        print(f"{path}\t{prediction['caption']}")


@app.command()
def answer(
    image: Annotated[str, typer.Argument(help="An image file.")],
    question: Annotated[str, typer.Argument(help="A question about it, in quotes.")],
    model: Registered = "",
) -> None:
    """Answers a question about an image with the champion, with the five most likely answers."""
    from vlp_models.cli.run import predict
    from vlp_models.tasks import task_class

    print("\n".join(task_class("vqa").spoken(predict("vqa", [image], [question], model)[0])))


@app.command()
def judge(
    images: Annotated[list[str], typer.Argument(help="An image file, or two: the left one and the right one.")],
    statement: Annotated[str, typer.Argument(help="A statement about it, or about both, in quotes.")],
    model: Registered = "",
) -> None:
    """Says whether a statement about an image is true, or about two, with the champion (NLVR, NLVR2)."""
    from vlp_models.tasks import task_class

    task = "nlvr" if len(images) == 1 else "nlvr2"
    wanted = task_class(task).words
    if wanted is None or len(images) != wanted.images:
        raise ParamsError(f"vlp judge: {len(images)} images; a statement is about one or two")
    _print_prediction(task, images, statement, model)


@app.command(name="predict")
def predict_task(
    task: OneTask,
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [TEXT]",
            help="An image file (nlvr2: two), and what is asked of it, in quotes: a question, a statement, ...",
        ),
    ],
    model: Registered = "",
) -> None:
    """What a task's champion says of an image. `caption`, `answer` and `judge` are short for some of them."""
    from vlp_models.tasks import task_class

    asked = task_class(task).words
    if asked is None:
        raise ParamsError(f"the task {task} is not served: it does not look at one image at a time")
    images, texts = given[: asked.images], given[asked.images :]
    usage = f"vlp predict {task} {' '.join(['IMAGE'] * asked.images)}{' TEXT' if asked.text else ''}"
    if len(images) < asked.images or len(texts) > 1:
        raise ParamsError(f"{usage}: {len(given)} arguments are given")
    if asked.text and not any(texts):
        raise ParamsError(f"{usage}: the text is missing, its {asked.text}")
    _print_prediction(task, images, texts[0] if asked.text else "", model)


def _print_prediction(task: str, images: list[str], text: str, model: str) -> None:
    """Of one request, the images of which belong together."""
    from vlp_models.cli.run import predict
    from vlp_models.tasks import task_class

    one: list[str | list[str]] = [images[0] if len(images) == 1 else images]
    for prediction in predict(task, one, [text] if text else None, model):
        print("\n".join(task_class(task).spoken(prediction)))


@app.command()
def demo(
    runs: Annotated[
        list[str] | None, typer.Option("--run", help="A run whose newest version answers, instead of the champion.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    split: Annotated[str, typer.Option(help="The photos that are searched: train, val or test.")] = "test",
) -> None:
    """Serves a web page: drop a photo, read its caption, ask about it, search photos by text. Needs Gradio."""
    from vlp_models.cli.demo import run

    run(host=host, port=port, runs=runs or [], split=split)


@app.command()
def promote(
    task: OneTask,
    version: Annotated[int, typer.Option(help="The version to promote; default: the best of all runs.")] = 0,
    force_first: Annotated[bool, typer.Option(help="A first champion may miss floors and validation.")] = False,
    by: Asker = "",
) -> None:
    """Makes the challenger of a task its champion if the gate lets it pass. Exit code 3: refused, with the reasons."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promote import REFUSED, explain, promote_task

    decision = promote_task(load_params(), Workspace(), task, version=version or None, force_first=force_first, by=by)
    print("\n".join(explain(decision)))
    raise typer.Exit(REFUSED if decision.outcome == "refused" else 0)


@app.command()
def rollback(
    task: OneTask,
    by: Asker = "",
) -> None:
    """Restores the champion before; the one withdrawn is promoted again only by its number."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promote import explain, rollback_task

    print("\n".join(explain(rollback_task(load_params(), Workspace(), task, by=by))))


@app.command()
def history(
    task: OneTask,
    as_json: Annotated[bool, typer.Option("--json", help="The entries as JSON lines.")] = False,
) -> None:
    """Every decision on a task's champion, from the ledger; checks the ledger's chain."""
    from vlp_models.cli.history import print_history
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.promote import history_rows

    print_history(history_rows(load_params(), Workspace(), task), as_json=as_json)


@app.command()
def lineage(
    model: Annotated[str, typer.Argument(help="A model or task: vqa, vlp-vqa@challenger, vlp-vqa/3.")],
    file: Annotated[str, typer.Option(help="Print a file kept with the version instead, e.g. params.yaml.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> None:
    """Where a registered version came from, and the commands that rebuild it."""
    from vlp_models.cli.history import print_lineage
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    print_lineage(load_params(), Workspace(), model, file=file, as_json=as_json)


@app.command()
def verify(
    version: Annotated[str, typer.Argument(help="A version: vqa, vlp-vqa/3, vlp-vqa@champion.")],
    as_json: Annotated[bool, typer.Option("--json", help="The checks as JSON.")] = False,
) -> None:
    """Is a registered version what its lineage says: files, code, data, scores? Exit code 1: something differs."""
    from vlp_models.cli.run import print_verification

    raise typer.Exit(print_verification(version, as_json=as_json))


@app.command()
def verify_resume(
    run: Annotated[str, typer.Argument(help="pretrain/NAME or finetune/NAME; default: the first of params.yaml.")] = "",
    steps: Annotated[int, typer.Option(help="Updates of the short training.")] = 6,
) -> None:
    """Trains for a few updates, whole and once more killed and resumed. Exit code 1: the results differ by a bit."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.verify_resume import verify_resume as resume

    found = resume(load_params(), Workspace(), run, steps)
    print(f"{found.run}: {found.steps} updates, killed after update {found.killed_at} was saved, and resumed")
    print("\n".join(found.differ or [f"all {found.files} files of the checkpoint are equal to the last bit"]))
    raise typer.Exit(int(bool(found.differ)))


@app.command()
def status(
    ask_mlflow: Annotated[bool, typer.Option("--mlflow", help="Aliases from MLflow, not from the ledger.")] = False,
) -> None:
    """What is stale, what runs, champion and challenger of each task, and the last decision."""
    from vlp_models.cli.status import print_status

    print_status(ask_mlflow=ask_mlflow)


@app.command()
def evaluate_alias(
    task: OneTask,
    alias: Annotated[str, typer.Argument(help="champion, challenger or previous.")] = "champion",
) -> None:
    """Scores a registered model on the test split as it is now, into reports/aliases/."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.reevaluate import evaluate_alias

    evaluate_alias(load_params(), Workspace(), task, alias)


@app.command()
def import_checkpoint(
    source: Annotated[
        str, typer.Argument(help="A weights file, a folder (bert, soho-parts), package:NAME, or timm:NAME (timm).")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Of public code: xmodaler-tden, unified-vlp, vlmo, soho. Of a part: bert, beit, timm (a CNN or ViT), "
            "soho-parts (a CNN, BERT or both).",
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the model in params.yaml: checkpoints/imported/NAME is written.")],
    task: Annotated[str, typer.Option(help="vqa or vcr, where the weights leave it open.")] = "",
    heads: Annotated[int, typer.Option(help="Attention heads of xmodaler-tden; default: one per 64 dimensions.")] = 0,
    answers: Annotated[str, typer.Option(help="Of a VQA model: a JSON list, its answers in their order.")] = "",
    max_text_len: Annotated[int, typer.Option(help="Of a task's model: the tokens it was trained with.")] = 0,
    max_regions: Annotated[int, typer.Option(help="Of a task's model: the regions it was trained with.")] = 0,
) -> None:
    """Makes a checkpoint of other programs' weights (of public code, BERT, BEiT, timm) for a model to begin with."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.import_checkpoint import import_checkpoint

    lines = import_checkpoint(
        form,
        Path(source),
        name,
        load_params(),
        Workspace(),
        task=task,
        heads=heads,
        answers=Path(answers) if answers else None,
        max_text_len=max_text_len,
        max_regions=max_regions,
    )
    for line in lines:
        print(line)


@app.command()
def doctor() -> None:
    """Tells what this machine lacks, in plain words. Exit code 1 if something must be mended."""
    from vlp_models.cli.run import print_findings

    raise typer.Exit(print_findings())


def main() -> None:
    """Entry point: a `VLPError` is one line on stderr and its exit code."""
    for tool in ("DVC_NO_ANALYTICS", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(tool, "true")
    # Threads that wait actively slow each other down tenfold as soon as there are more of them than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
            f"vlp: the disk is full ({redact(str(error))}). Nothing finished is lost: make room, then run the same "
            "command again",
            file=sys.stderr,
        )
        sys.exit(os.EX_IOERR)


def _print_traceback() -> None:
    import traceback

    print(redact(traceback.format_exc()), file=sys.stderr, end="")


if __name__ == "__main__":
    main()
