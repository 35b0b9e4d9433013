"""Write a bundle as a folder in Hugging Face's layout, which `VLP.from_pretrained` (hub.py) loads.

    model.safetensors            the weights, names as in docs/reference/checkpoints.md
    config.json                  the checkpoint's config, with `library_name`, `model_type` and `architectures`
    labels.json                  names of the classifier's rows, if it has any
    tokenizer.json, tokenizer_config.json, vocab.txt    as `transformers.AutoTokenizer` reads them
    preprocessor_config.json     how an image becomes the model's input
    detector/, search/           as in a bundle
    content.json                 SHA-256 of each of these files
    README.md                    the model card

What only the project needs stays out of it: provenance, with paths of this machine, and resume states.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from vlp_models.common.io import output_directory, write_json
from vlp_models.common.plugins import FOLDER, Table, active_plugins
from vlp_models.common.workspace import SEARCH
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import CheckpointError, DataError, first_line
from vlp_models.models.checkpoint import CONFIG, LABELS, WEIGHTS
from vlp_models.serving.bundle import (
    DETECTOR,
    PREPROCESSOR,
    checkpoint_folder,
    read_features_config,
    write_content,
)
from vlp_models.serving.predictor import ImageModel

EXPORT_WEIGHTS = Table("export_weights", {})  # type of weights besides float32 -> `module:function`
LIBRARY = "vlp-flows"  # `library_name` and `model_type`
CARD = "README.md"
# What may be in an export; nothing else is uploaded or downloaded. No format here can run code.
PATTERNS = ("*.json", "*.safetensors", "vocab.txt", CARD)


def write_export(bundle: Path, directory: Path, card: str) -> None:
    """Write the export, complete or not at all: it is loaded once before it gets its name.

    Args:
        directory: must not exist, or be empty.
        card: text of README.md.

    Raises:
        DataError: `directory` exists.
        CheckpointError: the bundle is damaged, or cannot compute the model's input from an image.
    """
    directory = directory.resolve()
    check_target(directory)
    model = ImageModel(bundle)
    if model.task_model.request is None and model.task != "retrieval":
        raise CheckpointError(
            f"{bundle}: a model of the task {model.task} cannot be applied to an image, so not exported"
        )
    # A plugin of the project is code that no other machine has.
    for kind, name in (("families", model.task_model.info.family), ("tasks", model.task)):
        target = active_plugins(kind).get(name, "")
        if target.startswith(f"{FOLDER}."):
            raise CheckpointError(
                f"`plugins.{kind}.{name}: {target}`: an export has no code, so nothing could load it; move the plugin "
                f"into a package with an entry point in the group vlp_flows.{kind}"
            )
    # Checkpoint, tokenizer, input settings, detector, search, card, and last the hashes of all of them.
    with output_directory(directory) as folder:
        checkpoint = checkpoint_folder(bundle)
        for name in (WEIGHTS, LABELS):
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, folder / name)
        write_json(folder / CONFIG, _config(model))
        model.task_model.tokenizer.save_pretrained(folder, model.task_model.info.max_text_len)
        write_json(folder / PREPROCESSOR, _preprocessor_config(model, bundle))
        if any((bundle / DETECTOR).glob("*.safetensors")):  # a grid of cells needs none
            (folder / DETECTOR).mkdir()
            for file in (bundle / DETECTOR).glob("*.safetensors"):
                shutil.copyfile(file, folder / DETECTOR / file.name)
            record = json.loads((bundle / DETECTOR / CONFIG).read_text(encoding="utf-8"))
            # Without the record of its training, which names files of this machine.
            write_json(folder / DETECTOR / CONFIG, {**record, "training": {}})
        if (bundle / SEARCH).is_dir():
            shutil.copytree(bundle / SEARCH, folder / SEARCH, copy_function=shutil.copyfile)
        (folder / CARD).write_text(card, encoding="utf-8")
        # No modules: an export has no code, so content.json lists files only.
        write_content(folder, [])
        ImageModel(folder)  # raises if the export cannot be loaded


def check_target(directory: Path) -> None:
    """Check that an export can be written there.

    Raises:
        DataError: `directory` exists and is not an empty folder.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory.resolve()}: already exists; name a new folder, or remove this one first")


def check_library(folder: Path, source: str) -> None:
    """Check that a folder's config.json was written by `write_export`. source: the folder's name for messages.

    Raises:
        CheckpointError: it was not.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{source}: not a model of {LIBRARY}: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {CONFIG} cannot be read: {first_line(error)}") from None
    if not isinstance(config, dict):
        config = {}
    if config.get("library_name") == LIBRARY:
        return
    # A checkpoint's `format` is `vlp-...`, with a version.
    if str(config.get("format", "")).startswith("vlp-"):
        raise CheckpointError(
            f"{source}: a checkpoint of a project, not an export; export its registered version: `vlp export TASK DIR`"
        )
    keys = [key for key in ("library_name", "model_type", "architectures") if config.get(key)]
    origin = ", ".join(f"{key} {config[key]!r:.60}" for key in keys) or "no library_name"
    raise CheckpointError(f"{source}: not a model of {LIBRARY}: {CONFIG} has {origin}")


def _config(model: ImageModel) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    # Provenance has paths of this machine and names of its data.
    info = dataclasses.replace(model.task_model.info, provenance={})
    try:
        library_version = version(LIBRARY)
    except PackageNotFoundError:
        library_version = "unknown"
    return {
        **info.to_json(),
        "library_name": LIBRARY,
        "model_type": LIBRARY,
        "architectures": [type(model.task_model.model).__name__],
        "vlp_flows_version": library_version,
    }


def _preprocessor_config(model: ImageModel, bundle: Path) -> dict[str, Any]:
    """Return how an image becomes the model's input; with regions, what `read_features_config` reads."""
    image = model.inputs.image
    if isinstance(image, PixelInput):
        # What serving uses; the model's own config has the rest, and decides
        served = {"resize": image.resize, "size": {"height": image.height, "width": image.width}}
        return {"input": "pixels", **served, "image_mean": list(image.mean), "image_std": list(image.std)}
    if image is None:
        return {"input": "none"}
    return {"input": "regions", **read_features_config(bundle)}
