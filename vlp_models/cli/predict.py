"""Commands that apply a registered model to images: caption, answer, judge, predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vlp_models.errors import DataError, ParamsError
from vlp_models.tasks import TASKS

Model = Annotated[
    str,
    typer.Option(
        help="A registered model or version: vlp-vqa, vlp-vqa/3, vlp-vqa@challenger. Default: the champion, or the "
        "challenger before the first promotion."
    ),
]


def caption(images: Annotated[list[str], typer.Argument(help="Image files.")], model: Model = "") -> None:
    """Caption images with the champion model.

    Example: `vlp caption photo.jpg`
    """
    for path, prediction in zip(images, predictions("captioning", images, None, model), strict=True):
        print(f"{path}\t{prediction['caption']}")


def answer(
    image: Annotated[str, typer.Argument(help="An image file.")],
    question: Annotated[str, typer.Argument(help="A question about it, in quotes.")],
    model: Model = "",
) -> None:
    """Answer a question about an image, with the five most likely answers.

    Example: `vlp answer photo.jpg "What color is the cat?"`
    """
    _print_predictions("vqa", [image], question, model)


def judge(
    images: Annotated[list[str], typer.Argument(help="One image file, or two: left and right.")],
    statement: Annotated[str, typer.Argument(help="A statement about the image or the pair, in quotes.")],
    model: Model = "",
) -> None:
    """Judge whether a statement about one image (NLVR) or two (NLVR2) is true."""
    from vlp_models.tasks import task_class

    task = "nlvr" if len(images) == 1 else "nlvr2"
    request = task_class(task).request
    if request is None or len(images) != request.images:
        raise ParamsError(f"vlp judge: got {len(images)} images; a statement is about one or two")
    _print_predictions(task, images, statement, model)


def predict(
    task: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [TEXT]",
            help="An image file (nlvr2: two), then the task's text in quotes, if any: a question, a statement, ...",
        ),
    ],
    model: Model = "",
) -> None:
    """Apply the champion model of any task to an image.

    Example: `vlp predict entailment photo.jpg "Two dogs are playing."`
    """
    from vlp_models.params import load_params
    from vlp_models.registry.client import resolve_task
    from vlp_models.tasks import task_class

    task = resolve_task(load_params().tracking, task)
    request = task_class(task).request
    if request is None:
        raise ParamsError(f"the task {task} cannot be served: it compares images with each other")
    images, texts = inputs[: request.images], inputs[request.images :]
    usage = f"vlp predict {task} {' '.join(['IMAGE'] * request.images)}{' TEXT' if request.text else ''}"
    if len(images) < request.images or len(texts) > 1:
        raise ParamsError(f"{usage}: got {len(inputs)} arguments")
    if request.text and not any(texts):
        raise ParamsError(f"{usage}: the text is missing: {request.text}")
    _print_predictions(task, images, texts[0] if request.text else "", model)


def _print_predictions(task: str, images: list[str], text: str, model: str) -> None:
    """Print the prediction of one request; several images belong to it together."""
    from vlp_models.tasks import task_class

    request: list[str | list[str]] = [images[0] if len(images) == 1 else images]
    for prediction in predictions(task, request, [text] if text else None, model):
        print("\n".join(task_class(task).format_prediction(prediction)))


def predictions(
    task: str, images: Sequence[str | list[str]], texts: list[str] | None, model: str
) -> list[dict[str, Any]]:
    """Return the predictions of the champion of `task`, or of `model`.

    Args:
        images: one entry per request; a list for a task with several images.
        model: a registered name, whose champion is used, or a version such as `vlp-vqa/3` or `vlp-vqa@challenger`.

    Raises:
        DataError: an image is missing, or nothing is registered under that name.
    """
    paths = [path for one in images for path in ([one] if isinstance(one, str) else one)]
    missing = [path for path in paths if not os.path.isfile(path)]  # noqa: PTH113 - Path raises for a name too long
    if missing:
        raise DataError(f"{', '.join(missing)}: file not found")
    from vlp_models.cli.versions import resolve_version
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect, model_name
    from vlp_models.registry.versions import download_verified_bundle, load_predictor
    from vlp_models.serving.predictor import Predictor

    params = load_params()
    client = connect(params.tracking, Path.cwd())
    if "/" in model or "@" in model:
        predictor: Predictor = Predictor(download_verified_bundle(resolve_version(client, params, model)))
    else:
        predictor = load_predictor(client, model or model_name(params.tracking, task))
    return predictor.predict(images, texts)
