"""What the paper begins with, as SOHO's: a CNN trained on ImageNet (timm's or torchvision's names), and BERT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlp_models.data.bert_folder import WEIGHTS
from vlp_models.errors import CheckpointError
from vlp_models.models.bert import bert_weights
from vlp_models.models.foreign import Asked, Imported, read_state_dict
from vlp_models.models.pretrained_cnn import convert_cnn
from vlp_models.models.soho.config import IMAGENET, SOHOConfig
from vlp_models.vision.weights import data_config, read_backbone_weights, whose

CNN_FILES = ("backbone.safetensors", "backbone.pth")


def read_parts(source: Path, asked: Asked) -> Imported:
    """A CNN's weights file; or a folder with one called backbone.safetensors or backbone.pth, with BERT's files (of
    Hugging Face's bert-base: weights, config.json, vocab.txt), or with both. The architecture is `asked.config`'s.

    Raises:
        CheckpointError: a file is missing or damaged, is another architecture's, or of another vocabulary.
    """
    if asked.family != "soho":
        raise CheckpointError(
            "a CNN or BERT fills a part of a model of params.yaml: --name must be one of them, of the family soho"
        )
    config = asked.built(SOHOConfig)
    found = {
        "cnn": [source] if not source.is_dir() else _first(source, CNN_FILES),
        "bert": _first(source, WEIGHTS) if source.is_dir() else [],
    }
    if not any(found.values()):
        raise CheckpointError(f"{source}: holds neither a CNN ({' or '.join(CNN_FILES)}) nor BERT's weights")
    weights: dict[str, Tensor] = {}
    for file in found["cnn"]:
        weights |= convert_backbone(read_state_dict(file), config)
    if found["bert"]:
        weights |= bert_weights(source, asked).weights
    what = " and ".join(name for name, part in (("a CNN's", found["cnn"]), ("BERT's", found["bert"])) if part)
    return Imported(family="soho", what=what, config=asked.config, weights=weights, regions=False)


def read_timm_backbone(source: Path, asked: Asked) -> Imported:
    """The CNN, of the architecture that `asked.config` names, from wherever vlp_models/common/weight_files.py can name.

    Raises:
        MissingToolError, CheckpointError: see `read_backbone_weights` and `convert_backbone`.
    """
    config = asked.built(SOHOConfig)
    state = read_backbone_weights(str(source), config.backbone, asked.root, asked.where)
    weights = convert_backbone(state, config)
    config_there, notes = _read_as(whose(str(source), config.backbone), asked)
    return Imported(family="soho", what="a CNN's", config=config_there, weights=weights, notes=notes, regions=False)


def _read_as(name: str, asked: Asked) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`asked.config` with the pixels' mean and deviation that timm tells of `name`, unless it has its own; a note on
    each that is another."""
    told = {key: list(value) for key, value in data_config(name).items() if key in IMAGENET}
    notes = tuple(
        f"config.{key} is {asked.config[key]}; timm's data config of {name} has {value}"
        for key, value in told.items()
        if list(asked.config.get(key, value)) != value
    )
    return {**told, **asked.config}, notes


def convert_backbone(state: Mapping[str, Tensor], config: SOHOConfig) -> dict[str, Tensor]:
    """The CNN. What its classifier and the stages behind `backbone_stage` have is left out.

    Raises:
        CheckpointError: names are missing, misshapen, or none of this architecture's.
    """
    return convert_cnn(state, config.backbone, config.backbone_stage, config.backbone_options, "backbone")


def _first(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [folder / name for name in names if (folder / name).exists()][:1]
