"""`vlp classify`: which of some labels an image shows, by a model with two towers and without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.packages import quick_imports
from vlp_models.errors import DataError, ParamsError

IMAGES_AT_ONCE = 16
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def classify(
    images: Annotated[list[str], typer.Argument(help="Image files; or one folder whose sub-folders are the labels.")],
    labels: Annotated[
        str, typer.Option(help="The labels, separated by commas; default: the names of the folder's sub-folders.")
    ] = "",
    template: Annotated[
        list[str] | None, typer.Option(help="A sentence with {} for the label; several are averaged.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A checkpoint's folder, or a registered version such as vlp-retrieval/3. Default: the champion of "
            "retrieval."
        ),
    ] = "",
) -> None:
    """Choose among labels for each image, by the similarity of its embedding with those of sentences.

    Nothing is trained. With one folder per label, also prints how many images are right.
    Example: `vlp classify photo.jpg --labels dog,cat --model checkpoints/initial/siglip`
    """
    templates = template or ["a photo of a {}."]
    if wrong := [text for text in templates if text.count("{}") != 1]:
        raise ParamsError(f"vlp classify: --template {wrong[0]!r}: write {{}} once, where the label goes")
    files, truth = _find_images(images)
    names = [name.strip() for name in labels.split(",") if name.strip()] or sorted(set(truth))
    if len(names) < 2 or len(set(names)) < len(names):
        raise ParamsError(
            "vlp classify: give at least two different --labels, or a folder with one sub-folder per label"
        )
    if unknown := sorted(set(truth) - set(names) - {""}):
        raise ParamsError(f"vlp classify: --labels lacks the sub-folder {unknown[0]}")
    with quick_imports():
        from vlp_models.contrib.hub_models.classify import Classifier

        classifier = Classifier.open(model)
    embeddings_LE = classifier.embed_labels(names, templates)
    right = 0
    for start in range(0, len(files), IMAGES_AT_ONCE):
        chunk = files[start : start + IMAGES_AT_ONCE]
        shares_BL = classifier.compare(chunk, embeddings_LE)
        for file, label, share_L in zip(chunk, truth[start:], shares_BL.tolist(), strict=False):
            ranked = sorted(zip(share_L, names, strict=True), reverse=True)
            print(file, *(f"{name} {share:.1%}" for share, name in ranked[:3]), sep="\t")
            right += ranked[0][1] == label
    if any(truth):
        print(f"{right} of {len(files)} images right ({right / len(files):.1%}); chance: {1 / len(names):.1%}")


def _find_images(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return image files, and the label of each, "" without one.

    Raises:
        DataError: a file does not exist, or a folder has no images in sub-folders.
    """
    if len(paths) == 1 and (folder := Path(paths[0])).is_dir():
        files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{folder}: expected a sub-folder with images for each label")
        return [str(file) for file in files], [file.parent.name for file in files]
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise DataError(f"{', '.join(missing)}: file not found")
    return list(paths), [""] * len(paths)


COMMANDS = {"Use a model": {"classify": classify}}
WORK = {"classify": "classifying images"}
