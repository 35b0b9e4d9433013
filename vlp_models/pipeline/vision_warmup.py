"""A model that begins with eyes: what it learns to see in this workspace before its first step (vision/eyes.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from vlp_models.common.workspace import Workspace
from vlp_models.data.joins import FILE, read_boxed
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.protocols import SeesCells
from vlp_models.params import ModelParams, TrainerParams, VisionWarmupParams
from vlp_models.vision.training import (
    LabelledImage,
    Rows,
    TrainingOptions,
    categories_of,
    first_step,
    labelled_images,
    words_of,
)
from vlp_models.vision.vision_warmup import Eyes, open_eyes


def begin_with_eyes(
    model: nn.Module, p: ModelParams, trainer: TrainerParams, workspace: Workspace, where: str
) -> tuple[dict[str, Any], str]:
    """Trains the image's side in place. Returns what is kept of it (`provenance.vision_warmup`), and a line for people.

    Args:
        where: the model's place in params.yaml.

    Raises:
        ParamsError: it reads no pixels, or shows no cells.
        DataError: no object in the train split has a box.
        NonFiniteLossError: it diverged.
    """
    wanted = model.inputs.image  # type: ignore[union-attr]
    if not isinstance(wanted, PixelInput) or not isinstance(model, SeesCells):
        raise ParamsError(
            f"params.yaml: `{where}.vision_warmup`: a model of the family {p.family} has none; it reads no pixels"
        )
    rows = read_boxed(workspace.validated)
    images, words = _learnt(rows, workspace)
    if not images:
        raise DataError(
            f"{workspace.validated / FILE}: no object of the train split has a box, and `{where}.vision_warmup` learns "
            f"from them; leave `{where}.vision_warmup` out, or import weights that see"
        )
    if trainer.torch_threads:
        torch.set_num_threads(trainer.torch_threads)
    cuda = torch.cuda.is_available() and trainer.accelerator != "cpu"
    hidden: int = model.config.hidden  # type: ignore[union-attr, assignment]
    result, f1 = open_eyes(
        Eyes(model=model, cells=model.cells, wanted=wanted, side=model.cell_side, hidden=hidden),
        images,
        labelled_images(rows, "val", categories_of(rows), words, workspace.root),
        len(words),
        _options(p.vision_warmup, p.seed),
        crop=p.vision_warmup.crop,
        device=torch.device("cuda" if cuda else "cpu"),
        lower=f"{where}.vision_warmup.lr",
    )
    kept = {**asdict(p.vision_warmup), "seed": p.seed, "boxes": boxes_of(workspace), "images": len(images)}
    found = "no box in val" if f1 is None else f"F1 of {len(words)} words in val's cells {100 * f1:.1f}"
    line = f"eyes: {len(images):,} images, {result.seconds:.0f} s at {result.images_per_second:.0f} images/s, {found}"
    return {**kept, "words": list(words)}, line


def boxes_of(workspace: Workspace) -> str:
    """A hash of all that eyes learn from: the train split's rows."""
    rows = [row for row in read_boxed(workspace.validated) if row["split"] == "train"]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def first_step_with(kept: dict[str, Any], workspace: Workspace, image_ids: Set[str]) -> int | None:
    """Return the first step in which a recorded warm-up (`provenance.vision_warmup`) used one of these images, given
    the boxes in this workspace; None if it used none."""
    images, _ = _learnt(read_boxed(workspace.validated), workspace)
    p = VisionWarmupParams(**{name: kept[name] for name in asdict(VisionWarmupParams()) if name in kept})
    return first_step(images, _options(p, kept["seed"]), image_ids)


def _learnt(rows: Rows, workspace: Workspace) -> tuple[list[LabelledImage], tuple[str, ...]]:
    train = [row for row in rows if row["split"] == "train"]
    words = words_of(train)
    return labelled_images(train, "train", categories_of(train), words, workspace.root), words


def _options(p: VisionWarmupParams, seed: int) -> TrainingOptions:
    return TrainingOptions(steps=p.steps, batch_size=p.batch_size, lr=p.lr, seed=seed, flip=p.flip)
