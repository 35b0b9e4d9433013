"""Commands that apply a registered model to images: caption, answer, predict."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.common.packages import quick_imports
from vlp_models.errors import DataError, ParamsError, VLPError

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import Params
    from vlp_models.registry.promotion.gate import Baseline
    from vlp_models.serving.neighbors import NeighborCaptioner
    from vlp_models.serving.predictor import Predictor

IMAGES_AT_ONCE = 16  # captioned before the next ones are opened
Model = Annotated[
    str,
    typer.Option(
        help="A registered model or version of the task: vlp-TASK, vlp-TASK/3, vlp-TASK@challenger. Default: the "
        "champion, or the challenger before the first promotion."
    ),
]


def caption(
    images: Annotated[list[str], typer.Argument(help="Image files.")],
    model: Model = "",
    nearest_neighbor: Annotated[
        bool,
        typer.Option(
            "--nearest-neighbor",
            help="Use the captions of similar training photos in place of a model; the default while there is no "
            "champion and the trained model is not better.",
        ),
    ] = False,
) -> None:
    """Caption images with the champion model.

    Example: `vlp caption photo.jpg`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.registry.serving_cache import choose_neighbors

    if nearest_neighbor and model:
        raise ParamsError("vlp caption: give --model or --nearest-neighbor, not both")
    # Before the model is loaded, which takes seconds.
    _require_files(images)
    params, note = load_params(), ""
    if nearest_neighbor:
        from vlp_models.serving.neighbors import METHOD

        note = f"Nearest-neighbor caption: {METHOD}; no model wrote it."
    elif not model and (baseline := choose_neighbors(params, Path.cwd())) is not None:
        note = describe_neighbors(baseline, params)
    if note:
        # Opened before the note is printed: if it fails, the note would be wrong.
        neighbors = open_neighbors(params, Workspace())
        print(note, file=sys.stderr)
        _print_captions(neighbors.caption, images)
    else:
        predictor = _open_predictor("captioning", model)
        _print_captions(lambda paths: [result["caption"] for result in predictor.predict(paths)], images)


def _print_captions(make: Callable[[Sequence[str]], list[str]], images: Sequence[str]) -> None:
    """Print the captions of image files, a few files at a time; a damaged file is named, and the others go on."""
    damaged: list[str] = []

    def show(paths: Sequence[str]) -> None:
        try:
            captions = make(paths)
        except DataError as error:
            if len(paths) == 1:
                damaged.append(str(error))
            else:
                for path in paths:
                    show([path])
            return
        for path, text in zip(paths, captions, strict=True):
            print(f"{path}\t{text}")

    # A batch with a damaged file raises for all of its images: they are tried one by one.
    for start in range(0, len(images), IMAGES_AT_ONCE):
        show(images[start : start + IMAGES_AT_ONCE])
    if damaged and len(images) == 1:
        raise DataError(damaged[0])
    if damaged:
        print(*damaged, sep="\n", file=sys.stderr)
        raise DataError(f"{len(damaged)} of {len(images)} images have no caption")


def describe_neighbors(baseline: Baseline, params: Params) -> str:
    """Say that a caption is not a model's, and how the two score."""
    from vlp_models.registry.promotion.gate_rule import gate_metric
    from vlp_models.serving.neighbors import METHOD

    metric = gate_metric(params, "captioning")
    return (
        f"No champion yet: this is {METHOD} ({metric} {baseline.value:.1f} on {baseline.dataset} "
        f"{params.promotion.split}; the trained model has {baseline.own:.1f})."
    )


def open_neighbors(params: Params, workspace: Workspace) -> NeighborCaptioner:
    """Open the nearest-neighbor captioner on the datasets that the captioning runs train on."""
    from vlp_models.params import to_plain

    with quick_imports():
        from vlp_models.serving.neighbors import NeighborCaptioner

    runs = [run for run in params.finetune.values() if run.task == "captioning"]
    # Of every captioning run, the datasets that it names, or all.
    sources = {name for run in runs for name in run.sources or params.data} or set(params.data)
    try:
        return NeighborCaptioner(workspace, to_plain(params.features), sorted(sources))
    except VLPError as error:
        raise DataError(
            f"{error}. The captions of similar photos are read there; `--model vlp-captioning@challenger` uses the "
            "trained model"
        ) from None


def answer(
    image: Annotated[str, typer.Argument(help="An image file.")],
    question: Annotated[str, typer.Argument(help="A question about it, in quotes.")],
    model: Model = "",
) -> None:
    """Answer a question about an image, with the five most likely answers.

    Example: `vlp answer photo.jpg "What color is the cat?"`
    """
    print_predictions("vqa", [image], question, model)


def predict(
    task: Annotated[
        str, typer.Argument(help="A task with a registered model (`vlp status`), such as vqa or a plugin's.")
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [TEXT]",
            help="An image file (nlvr2: two), then the task's text in quotes, if any: a question, a statement, ...",
        ),
    ],
    model: Model = "",
) -> None:
    """Apply the champion model of a task to an image. Retrieval and VCR are not served.

    Example: `vlp predict entailment photo.jpg "Two dogs are playing."`
    """
    from vlp_models.params import load_params
    from vlp_models.registry.client import resolve_task
    from vlp_models.tasks import task_class

    task = resolve_task(load_params().tracking, task)
    request = task_class(task).request
    if request is None:
        raise ParamsError(f"the task {task} is not served; its scores are in reports/eval")
    images, texts = inputs[: request.images], inputs[request.images :]
    usage = f"vlp predict {task} {' '.join(['IMAGE'] * request.images)}{' TEXT' if request.text else ''}"
    # At most one text, and none for a task that takes none.
    if len(images) < request.images or len(texts) > bool(request.text):
        raise ParamsError(f"{usage}: got {len(inputs)} arguments")
    if request.text and not any(text.strip() for text in texts):
        raise ParamsError(f"{usage}: the text is missing: {request.text}")
    print_predictions(task, images, texts[0] if request.text else None, model)


def print_predictions(task: str, images: list[str], text: str | None, model: str) -> None:
    """Print the prediction of one request; several images belong to it together."""
    from vlp_models.tasks import task_class

    # One request: several images are a list within the list.
    request: list[str | list[str]] = [images[0] if len(images) == 1 else images]
    for prediction in predictions(task, request, None if text is None else [text], model):
        print("\n".join(task_class(task).format_prediction(prediction)))


def predictions(
    task: str, images: Sequence[str | list[str]], texts: list[str] | None, model: str
) -> list[dict[str, Any]]:
    """Return the predictions of the champion of `task`, or of `model`.

    Args:
        images: one entry per request; a list for a task with several images.
        model: a registered name, whose champion is used, or a version such as `vlp-vqa/3` or `vlp-vqa@challenger`.

    Raises:
        DataError: an image is missing, a text is blank, or nothing is registered under that name.
        ParamsError: the model is for another task.
        TrackingError: MLflow or a bucket does not answer.
    """
    for paths in images:
        _require_files([paths] if isinstance(paths, str) else paths)
    return _open_predictor(task, model).predict(images, texts)


def _open_predictor(task: str, model: str) -> Predictor:
    """Open the champion of `task`, or `model`; see `predictions`."""
    from vlp_models.params import load_params
    from vlp_models.registry.client import mlflow_errors, model_name
    from vlp_models.registry.serving_cache import open_served_bundle

    params = load_params()
    with mlflow_errors(params):
        bundle, version = open_served_bundle(params.tracking, Path.cwd(), model or model_name(params.tracking, task))
    with quick_imports():
        from vlp_models.serving.predictor import Predictor

        predictor = Predictor(bundle)
    if predictor.task != task:
        raise ParamsError(
            f"{version}: a model for {predictor.task}; name one for {task}, such as {model_name(params.tracking, task)}"
        )
    return predictor


def _require_files(paths: Sequence[str]) -> None:
    missing = [path for path in paths if not os.path.isfile(path)]  # noqa: PTH113 - Path raises for a name too long
    if missing:
        raise DataError(f"{', '.join(missing)}: file not found")
