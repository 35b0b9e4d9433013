"""Weights that a model starts with instead of random ones, for the stage `initial`.

    models.NAME.text_init       a BERT's weights for the text encoder
    models.NAME.image_init      timm's weights for the vision encoder of a model that reads pixels
    models.NAME.vision_warmup   a short training of the vision encoder on the boxes of the train split

Each function changes the model in place, logs what it did, and returns what the checkpoint's config.json records
(`provenance`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlp_models.common.device import use_cuda
from vlp_models.common.io import hash_file
from vlp_models.common.log import get_logger
from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import CONFIG, find_folder, weights_file
from vlp_models.data.joins import FILE, read_boxed
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import CheckpointError, DataError, shorten_list
from vlp_models.models.convert import INIT_READERS, ImportedModel, ImportRequest
from vlp_models.models.partial_load import LoadReport, check_same_config, load_matching, summarize_names
from vlp_models.models.protocols import EncodesCells
from vlp_models.params import ModelParams, TrainerParams, VisionWarmupParams
from vlp_models.pipeline.prepared_data import PreparedData
from vlp_models.vision.training import (
    LabeledImage,
    Rows,
    TrainingOptions,
    categories_of,
    first_step,
    labeled_images,
    words_of,
)
from vlp_models.vision.vision_warmup import VisionEncoder, warm_up_vision

logger = get_logger(__name__)

# Tables whose first rows mean the same in BERT and in the models, even if the number of rows differs
TABLES = ("text_embedding.positions.weight", "text_embedding.types.weight")


def load_text_init(model: nn.Module, p: ModelParams, data: PreparedData, root: Path, where: str) -> dict[str, Any]:
    """Load a BERT's weights into the text encoder.

    Raises:
        MissingToolError: the package is not installed.
        DataError: no such folder, or it has no BERT tokenizer.
        CheckpointError: another architecture or other sizes, or a vocabulary that differs from data/tokenizer.
    """
    folder = find_folder(p.text_init, root, where)
    # the converter maps BERT's names to the family's
    request = ImportRequest(
        facts=data.facts,
        config=p.config,
        family=p.family,
        vocabulary=data.tokenizer.vocabulary,
        lowercase=data.tokenizer.lowercase,
    )
    imported: ImportedModel = import_target(INIT_READERS["text_init"])(folder, request)  # under the model's names
    report = load_matching(model, imported.weights, tables=TABLES)
    record = _summarize(model, report, imported)
    loaded = ", ".join(record["loaded"])
    logger.info("%s: %s of BERT's weights in %s", p.text_init, f"{_count(model, report):,}", loaded)
    for outcome, key in (("not loaded", "missing"), ("left out", "left_out")):
        if record[key]:
            logger.info("  %s: %s", outcome, ", ".join(record[key]))
    for note in imported.notes:
        logger.info("  %s", note)
    files = [folder / CONFIG, weights_file(folder)]
    return {"source": p.text_init, "files": {file.name: hash_file(file) for file in files}, **record}


def load_image_init(model: nn.Module, p: ModelParams, data: PreparedData, root: Path, where: str) -> dict[str, Any]:
    """Load timm's weights into the vision encoder: SOHO's CNN; VLMo's patches and vision experts, or its CNN stem.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: the family reads no pixels, the weights have another architecture or size than the model, or
            the file does not exist.
    """
    request = ImportRequest(facts=data.facts, config=p.config, family=p.family, root=root, where=where)
    try:
        imported: ImportedModel = import_target(INIT_READERS["image_init"])(Path(p.image_init), request)
        # both as params.yaml has them: lists in place of tuples
        imported_config = json.loads(json.dumps(dict(imported.config)))
        config = json.loads(json.dumps(asdict(model.config)))  # type: ignore[call-overload]
        check_same_config(imported_config, config, imported.config)
        report = load_matching(model, imported.weights)
        if report.left_out:
            raise CheckpointError(f"the model has no place for {shorten_list(report.left_out)}")
    except CheckpointError as error:
        raise CheckpointError(f"params.yaml: `{where}: {p.image_init}`: {error}") from None
    modules = ", ".join(sorted({name.partition(".")[0] for name in report.loaded}))
    logger.info("%s: %s of %s weights in %s", p.image_init, f"{_count(model, report):,}", imported.origin, modules)
    for note in imported.notes:
        logger.info("  %s", note)
    # A library's weights are identified by their name, a file by its hash.
    file = None if library_of(p.image_init) else find_weights_file(p.image_init, root, where)
    files = {"files": {file.name: hash_file(file)}} if file else {}
    return {"source": p.image_init, **files, **_summarize(model, report, imported)}


def _summarize(model: nn.Module, report: LoadReport, imported: ImportedModel) -> dict[str, list[str]]:
    weights = model.state_dict()
    return {
        "loaded": summarize_names(report.loaded, weights),
        "missing": summarize_names(report.missing, weights),
        "left_out": [*summarize_names(report.left_out, imported.weights), *imported.left_out],
        "notes": list(imported.notes),
    }


def _count(model: nn.Module, report: LoadReport) -> int:
    """Return the number of loaded parameters."""
    weights = model.state_dict()
    return sum(weights[name].numel() for name in report.loaded)


def warm_up(
    model: nn.Module, p: ModelParams, trainer: TrainerParams, workspace: Workspace, where: str
) -> dict[str, Any]:
    """Train the vision encoder on the boxes of the train split (vision/vision_warmup.py).

    Args:
        where: the model's section of params.yaml.

    Raises:
        DataError: no object in the train split has a box.
        NonFiniteLossError: the training diverged.
    """
    image = model.inputs.image  # type: ignore[union-attr]
    assert isinstance(image, PixelInput) and isinstance(model, EncodesCells)  # as `check_params` requires
    # cells of the image are labeled with the words of the boxes that cover them
    rows = read_boxed(workspace.validated)
    images, words = _warmup_data(rows, workspace)
    if not images:
        raise DataError(
            f"{workspace.validated / FILE}: no object of the train split has a box, and `{where}.vision_warmup` trains "
            f"on boxes; remove `{where}.vision_warmup`, or set `image_init`"
        )
    if trainer.torch_threads:  # this stage has no trainer that sets them
        torch.set_num_threads(trainer.torch_threads)
    hidden: int = model.config.hidden  # type: ignore[union-attr, assignment]
    result, f1 = warm_up_vision(
        VisionEncoder(model=model, cells=model.cells, pixel_input=image, cell_side=model.cell_side, hidden=hidden),
        images,
        labeled_images(rows, "val", categories_of(rows), words, workspace.root),
        len(words),
        _options(p.vision_warmup, p.seed),
        crop=p.vision_warmup.crop,
        device=torch.device("cuda" if use_cuda(trainer.accelerator) else "cpu"),
        lr_key=f"{where}.vision_warmup.lr",
    )
    score = "no box in val" if f1 is None else f"F1 {100 * f1:.1f} for {len(words)} words in val's cells"
    logger.info(
        "vision warm-up: %s images, %.0f s at %.0f images/s, %s",
        f"{len(images):,}",
        result.seconds,
        result.images_per_second,
        score,
    )
    record = {**asdict(p.vision_warmup), "seed": p.seed, "boxes": hash_boxes(workspace), "images": len(images)}
    return {**record, "words": list(words)}


def hash_boxes(workspace: Workspace) -> str:
    """Return a hash of everything a warm-up trains on: the rows of the train split."""
    rows = [row for row in read_boxed(workspace.validated) if row["split"] == "train"]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def first_warmup_step(record: dict[str, Any], workspace: Workspace, image_ids: Set[str]) -> int | None:
    """Return the first step of a recorded warm-up (`provenance.vision_warmup`) that used one of these images.

    Computed from the boxes in this workspace. None if it used none of the images.
    """
    # the same order of images as in the warm-up, from its recorded settings
    images, _ = _warmup_data(read_boxed(workspace.validated), workspace)
    # A record of an earlier version may lack newer settings, which then have their defaults.
    p = VisionWarmupParams(**{name: record[name] for name in asdict(VisionWarmupParams()) if name in record})
    return first_step(images, _options(p, record["seed"]), image_ids)


def _warmup_data(rows: Rows, workspace: Workspace) -> tuple[list[LabeledImage], tuple[str, ...]]:
    """Return the train split's images with their boxes, and the words that label them."""
    train = [row for row in rows if row["split"] == "train"]
    words = words_of(train)
    return labeled_images(train, "train", categories_of(train), words, workspace.root), words


def _options(p: VisionWarmupParams, seed: int) -> TrainingOptions:
    return TrainingOptions(steps=p.steps, batch_size=p.batch_size, lr=p.lr, seed=seed, flip=p.flip)
