"""`vlp demo`: serve the demo page with versions from the registry."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.common.progress import announced
from vlp_models.errors import DataError, VLPError

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.demo_page.handlers import Page
    from vlp_models.params import Params

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TASKS = ("captioning", "vqa", "retrieval")


def demo(
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", help="Use the newest version of this run instead of the champion; may be repeated."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; default: localhost only.", show_default=False)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    split: Annotated[
        str, typer.Option(help="The images to search, and the examples to click: train, val or test.")
    ] = "test",
    corrections: Annotated[
        bool | None,
        typer.Option(
            help="Let visitors correct captions, which go to the inbox (`ingest.inbox`); default: on localhost only.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Try the champion models on a web page: caption an image, ask about it, search images by text.

    Needs Gradio. Example: `vlp demo --run tden-vqa`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.demo_page.app import check_installed, serving
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import stopped_by_signals

    check_installed()
    with announced("loading the models"):
        accepts = host in LOOPBACK if corrections is None else corrections
        page = make_page(load_params(), Workspace(), runs=runs or (), split=split, corrections=accepts)
    for task, reason in page.missing.items():
        print(f"{task}: {reason}")
    # Uploaded images are deleted before SIGTERM ends it.
    with (
        stopped_by_signals("vlp demo", announce=False),
        serving(page, host=host, port=port) as address,
        suppress(KeyboardInterrupt),  # also one that is sent as soon as the address is printed
    ):
        print(f"the demo is at {address}; press Ctrl-C to stop", flush=True)
        if host not in LOOPBACK:
            print("anyone who can reach this address can use the page: it has no password", flush=True)
        threading.Event().wait()


def make_page(
    params: Params, workspace: Workspace, *, runs: Sequence[str] = (), split: str = "test", corrections: bool = False
) -> Page:
    """Return the page with each task's champion, or the newest version of one of `runs`.

    The page shows a message in place of a model that cannot be loaded, and nearest-neighbor captions in place of a
    captioner that is not better.

    Args:
        corrections: accept corrected captions, if `ingest.inbox` names a folder.

    Raises:
        DataError: no model can be loaded, or a run has no registered version.
    """
    from vlp_models.cli.predict import describe_neighbors, open_neighbors
    from vlp_models.contrib.demo_page.corrections import Corrections
    from vlp_models.contrib.demo_page.handlers import Page, PhotoModel
    from vlp_models.contrib.demo_page.photos import PhotoSearch, find_examples, photo_finder
    from vlp_models.contrib.demo_page.version_card import make_version_card
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.evaluations import read_lineage, read_scores
    from vlp_models.registry.serving_cache import choose_neighbors
    from vlp_models.registry.versions import download_verified_bundle
    from vlp_models.serving.predictor import Predictor

    models: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        versions = _versions(client, params, runs)
        for task in TASKS:
            if task not in versions:
                missing[task] = _explain_missing(params, task)
                # No champion because its challenger was not better than captions of similar photos: show those.
                if task == "captioning" and (baseline := choose_neighbors(params, workspace.root)):
                    try:
                        models["neighbors"] = open_neighbors(params, workspace)
                        models["training_photo"] = photo_finder(workspace)
                        missing[task] = describe_neighbors(baseline, params)
                    except VLPError as error:
                        missing[task] = f"No champion yet, and no captions of similar training photos: {error}"
                continue
            version, selected_by = versions[task]
            try:
                bundle = download_verified_bundle(version)
                card = make_version_card(
                    name=version.name,
                    version=int(version.version),
                    selected_by=selected_by,
                    tags=dict(version.tags),
                    lineage=read_lineage(client, version),
                    scores=read_scores(client, version),
                )
                if task == "retrieval":
                    models |= {"search": PhotoSearch(bundle, workspace, split), "search_card": card}
                else:
                    models["captioner" if task == "captioning" else "answerer"] = PhotoModel(Predictor(bundle), card)
            except VLPError as error:
                missing[task] = f"{version.name} version {version.version} cannot be used: {error}"
    if not models:
        raise DataError(f"vlp demo: no model to show. {' '.join(f'{task}: {why}' for task, why in missing.items())}")
    examples = find_examples(workspace, split)
    if corrections and params.ingest.inbox:
        inbox, evaluation = workspace.root / params.ingest.inbox, examples if split != "train" else ()
        models["corrections"] = Corrections(inbox=inbox, rules=params.validate, evaluation=evaluation)
    return Page(**models, missing=missing, examples=examples)


def _explain_missing(params: Params, task: str) -> str:
    if any(run.task == task for run in params.finetune.values()):
        return f"No champion yet: run `vlp promote {task}`, or use a run's version with `vlp demo --run NAME`."
    preset = "; `vlp use scenes-tasks` adds one" if "scenes" in params.data else ""
    return f"params.yaml has no run of this task{preset}."


def _versions(client: Any, params: Params, runs: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return task -> (version, how it was chosen)."""
    from vlp_models.registry.client import model_name
    from vlp_models.registry.versions import CHAMPION, find_version_by_alias, run_alias

    versions: dict[str, tuple[Any, str]] = {}
    names = {task: model_name(params.tracking, task) for task in TASKS}
    for run in runs:
        of_run = {task: find_version_by_alias(client, name, run_alias(run)) for task, name in names.items()}
        of_run = {task: version for task, version in of_run.items() if version is not None}
        if not of_run:
            raise DataError(
                f"vlp demo: the run {run} has no registered version for {', '.join(TASKS)}; `vlp status --mlflow` "
                "shows what is registered"
            )
        if repeated := of_run.keys() & versions.keys():
            raise DataError(f"vlp demo: two runs for {', '.join(repeated)}; give one")
        versions |= {task: (version, f"run {run}") for task, version in of_run.items()}
    for task, name in names.items():
        champion = find_version_by_alias(client, name, CHAMPION) if task not in versions else None
        if champion is not None:
            versions[task] = (champion, CHAMPION)
    return versions


COMMANDS = {"Use a model": {"demo": demo}}
WORK: dict[str, str] = {}
