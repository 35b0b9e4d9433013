"""What the stage `initial` does for `models.NAME.vision_warmup`: a short training on the boxes of the train split.

It changes the model in place, logs what it did, and returns what the checkpoint's config.json records (`provenance`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from vlp_models.common.device import use_cuda
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.detector.training import (
    LabeledImage,
    Rows,
    TrainingOptions,
    categories_of,
    first_step,
    labeled_images,
    words_of,
)
from vlp_models.contrib.detector.vision_warmup import VisionEncoder, warm_up_vision
from vlp_models.data.joins import FILE, hash_boxes, read_boxed
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError
from vlp_models.models.protocols import EncodesCells
from vlp_models.params import ModelParams, TrainerParams, VisionWarmupParams

logger = get_logger(__name__)


def warm_up(
    model: nn.Module, p: ModelParams, trainer: TrainerParams, workspace: Workspace, where: str
) -> dict[str, Any]:
    """Train the vision encoder on the boxes of the train split (vision_warmup.py).

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
    record = {
        **asdict(p.vision_warmup),
        "seed": p.seed,
        "boxes": hash_boxes(workspace.validated),
        "images": len(images),
    }
    return {**record, "words": list(words)}


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
