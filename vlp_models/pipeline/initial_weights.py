"""A model's text side beginning with a BERT's weights: `models.NAME.text_init`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlp_models.common.io import hash_file
from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.state_dicts import shorten_list
from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import CONFIG, find_folder, weights_file
from vlp_models.data.joins import FILE, read_boxed
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.convert.bert import read_bert
from vlp_models.models.convert.mapping import ImportRequest
from vlp_models.models.convert.timm import read_timm
from vlp_models.models.partial_load import check_same_config, load_matching, summarize_names
from vlp_models.models.protocols import SeesCells
from vlp_models.params import ModelParams, TrainerParams, VisionWarmupParams
from vlp_models.pipeline.training_job import Inputs, data_facts
from vlp_models.vision.training import (
    LabeledImage,
    Rows,
    TrainingOptions,
    categories_of,
    first_step,
    labeled_images,
    words_of,
)
from vlp_models.vision.vision_warmup import Eyes, warm_up_vision

TABLES = ("text_embedding.positions.weight", "text_embedding.types.weight")  # whose first rows mean the same


def begin_with_words(
    model: nn.Module, p: ModelParams, inputs: Inputs, root: Path, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fills what a BERT has of `model`.

    Returns what to keep with the checkpoint (source, the files' sha256, and what was taken, left out and is fresh), and
    the same in lines to print.

    Raises:
        MissingToolError: the package is not installed. DataError: no such folder, or no BERT's tokenizer.
        CheckpointError: another architecture, other sizes, or other words than data/tokenizer's.
    """
    folder = find_folder(p.text_init, root, where)
    tokenizer = inputs.tokenizer
    asked = ImportRequest(
        facts=data_facts(inputs),
        config=p.config,
        family=p.family,
        vocabulary=tokenizer.vocabulary,
        lowercase=tokenizer.lowercase,
    )
    imported = read_bert(folder, asked)
    report = load_matching(model, imported.weights, tables=TABLES)
    own = model.state_dict()
    told = {
        "taken": summarize_names(report.loaded, own),
        "fresh": summarize_names(report.missing, own),
        "left_out": [*summarize_names(report.left_out, imported.weights), *imported.left_out],
        "notes": list(imported.notes),
    }
    files = [folder / CONFIG, weights_file(folder)]
    kept = {"source": p.text_init, "files": {file.name: hash_file(file) for file in files}, **told}
    parameters = sum(own[name].numel() for name in report.loaded)
    lines = [f"{p.text_init}: {parameters:,} of BERT's weights in {', '.join(told['taken'])}"]
    lines += [f"  fresh: {', '.join(told['fresh'])}"] if told["fresh"] else []
    lines += [f"  left out: {', '.join(told['left_out'])}"] if told["left_out"] else []
    return kept, [*lines, *(f"  {note}" for note in told["notes"])]


def begin_with_image_weights(
    model: nn.Module, p: ModelParams, inputs: Inputs, root: Path, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fills what timm's weights have of `model`: SOHO's CNN; VLMo's patches and vision experts, or the CNN
    before them.

    Returns what to keep with the checkpoint (source, the file's sha256, what was taken and what stayed fresh), and the
    same in lines to print.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: the family reads no pixels, weights of another architecture or size than the model's, no such
            file.
    """
    asked = ImportRequest(facts=data_facts(inputs), config=p.config, family=p.family, root=root, where=where)
    try:
        imported = read_timm(Path(p.image_init), asked)
        check_same_config(_plain(imported.config), _plain(dataclasses.asdict(model.config)), imported.config)  # type: ignore[call-overload]
        report = load_matching(model, imported.weights)
        if report.left_out:
            raise CheckpointError(f"the model has no place for {shorten_list(report.left_out)}")
    except CheckpointError as error:
        raise CheckpointError(f"params.yaml: `{where}: {p.image_init}`: {error}") from None
    own = model.state_dict()
    told = {
        "taken": summarize_names(report.loaded, own),
        "fresh": summarize_names(report.missing, own),
        "notes": list(imported.notes),
    }
    file = None if library_of(p.image_init) else find_weights_file(p.image_init, root, where)
    kept = {"source": p.image_init, **({"files": {file.name: hash_file(file)}} if file else {}), **told}
    parameters = sum(own[name].numel() for name in report.loaded)
    modules = sorted({name.partition(".")[0] for name in report.loaded})
    lines = [f"{p.image_init}: {parameters:,} of {imported.what} weights in {', '.join(modules)}"]
    return kept, [*lines, *(f"  {note}" for note in imported.notes)]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As params.yaml would have it: lists, not tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config)))
    return plain


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
    result, f1 = warm_up_vision(
        Eyes(model=model, cells=model.cells, wanted=wanted, side=model.cell_side, hidden=hidden),
        images,
        labeled_images(rows, "val", categories_of(rows), words, workspace.root),
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


def _learnt(rows: Rows, workspace: Workspace) -> tuple[list[LabeledImage], tuple[str, ...]]:
    train = [row for row in rows if row["split"] == "train"]
    words = words_of(train)
    return labeled_images(train, "train", categories_of(train), words, workspace.root), words


def _options(p: VisionWarmupParams, seed: int) -> TrainingOptions:
    return TrainingOptions(steps=p.steps, batch_size=p.batch_size, lr=p.lr, seed=seed, flip=p.flip)
