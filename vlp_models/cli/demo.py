"""`vlp demo`: finds the versions that answer in the registry, and serves the page (serving/page)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError, Terminated, VLPError

if TYPE_CHECKING:
    from pathlib import Path

    from vlp_models.common.workspace import Workspace
    from vlp_models.params import Params
    from vlp_models.serving.page.handlers import Page

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TASKS = ("captioning", "vqa", "retrieval")


def run(*, host: str, port: int, runs: Sequence[str], split: str) -> None:
    """
    Raises:
        MissingToolError: Gradio is not installed.
        DataError: no version answers anything, or a run of `runs` has none.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.serving.page.app import check_installed, serving

    check_installed()
    page = make_page(load_params(), Workspace(), runs=runs, split=split)
    for task, reason in page.missing.items():
        print(f"{task}: {reason}")
    signal.signal(signal.SIGTERM, _end)  # so that dropped photos are deleted
    with serving(page, host=host, port=port) as address:
        print(f"the page is at {address}; Ctrl-C ends it", flush=True)
        if host not in LOOPBACK:
            print("whoever reaches this address can use the page: it asks for no password", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def _end(received: int, frame: Any) -> None:
    raise Terminated()


def make_page(params: Params, workspace: Workspace, *, runs: Sequence[str] = (), split: str = "test") -> Page:
    """The page of each task's champion, or of the newest version of one of `runs`. What can't be loaded is said on the
    page in its place.

    Raises:
        DataError: see `run`.
    """
    from vlp_models.pipeline.promote import mlflow_errors
    from vlp_models.registry.client import connect
    from vlp_models.registry.versions import checked_bundle
    from vlp_models.serving.page.handlers import Eye, Page
    from vlp_models.serving.page.photos import PhotoSearch
    from vlp_models.serving.predictor import Predictor

    made: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        versions = _versions(client, params, runs)
        for task in TASKS:
            if task not in versions:
                missing[task] = (
                    f"No champion yet: `vlp promote {task}` makes one, or `vlp demo --run NAME` takes a run's version."
                )
                continue
            version, chosen = versions[task]
            try:
                bundle = checked_bundle(version)
                origin = _origin(client, version, chosen, bundle)
                if task == "retrieval":
                    made |= {"search": PhotoSearch(bundle, workspace, split), "search_origin": origin}
                else:
                    made["captioner" if task == "captioning" else "answerer"] = Eye(Predictor(bundle), origin)
            except VLPError as error:
                missing[task] = f"{version.name} version {version.version} can't be used: {error}"
    if not made:
        raise DataError(f"vlp demo: nothing to show. {' '.join(f'{task}: {why}' for task, why in missing.items())}")
    return Page(**made, missing=missing)


def _versions(client: Any, params: Params, runs: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Task -> the version that answers, and how it was chosen."""
    from vlp_models.registry.versions import CHAMPION, by_alias, model_name, run_alias

    found: dict[str, tuple[Any, str]] = {}
    names = {task: model_name(params.tracking, task) for task in TASKS}
    for run in runs:
        known = {task: by_alias(client, name, run_alias(run)) for task, name in names.items()}
        own = {task: (version, f"run {run}") for task, version in known.items() if version is not None}
        if not own:
            raise DataError(
                f"vlp demo: the run {run} has no registered version for {', '.join(TASKS)}; `vlp status --mlflow` "
                "shows what is registered"
            )
        if own.keys() & found.keys():
            raise DataError(f"vlp demo: two runs for {', '.join(own.keys() & found.keys())}; name one")
        found |= own
    for task, name in names.items():
        champion = by_alias(client, name, CHAMPION) if task not in found else None
        if champion is not None:
            found[task] = (champion, CHAMPION)
    return found


def _origin(client: Any, version: Any, chosen: str, bundle: Path) -> Any:
    from vlp_models.registry.evaluations import read_lineage, read_scores
    from vlp_models.serving.page.version_card import origin

    return origin(
        name=version.name,
        version=int(version.version),
        chosen=chosen,
        tags=dict(version.tags),
        lineage=read_lineage(client, version),
        scores=read_scores(client, version),
        bundle=bundle,
    )
