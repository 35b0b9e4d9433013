"""Convert a timm or torchvision CNN and BERT's weights to SOHO: what its paper starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlp_models.models.convert.bert import BertSizes, ConvertedBert, convert_layout
from vlp_models.models.convert.mapping import ImportedModel, ImportRequest
from vlp_models.models.convert.timm import convert_cnn
from vlp_models.models.soho.config import IMAGENET, SOHOConfig
from vlp_models.vision.pretrained_weights import data_config, pretrained_model_name, read_backbone_weights


def read_timm_backbone(source: Path, request: ImportRequest) -> ImportedModel:
    """Read the CNN that `backbone` of `request.config` names, with timm's mean and deviation of its pixels."""
    config = request.build_config(SOHOConfig)
    state = read_backbone_weights(str(source), config.backbone, request.root, request.where)
    weights = convert_backbone(state, config)
    # The pixels' mean and deviation are the weights' own, unless the config sets others.
    name = pretrained_model_name(str(source), config.backbone)
    pixels = {key: list(value) for key, value in data_config(name).items() if key in IMAGENET}
    notes = tuple(
        f"config.{key} is {request.config[key]}; timm's data config of {name} has {value}"
        for key, value in pixels.items()
        if list(request.config.get(key, value)) != value
    )
    return ImportedModel(
        family="soho",
        origin="a CNN's",
        config={**pixels, **request.config},
        weights=weights,
        notes=notes,
        reads_regions=False,
    )


def convert_backbone(state: Mapping[str, Tensor], config: SOHOConfig) -> dict[str, Tensor]:
    """Convert the CNN; the weights of its classifier and of the stages after `backbone_stage` are left out.

    Raises:
        CheckpointError: names are missing, misshapen, or not of this architecture.
    """
    return convert_cnn(state, config.backbone, config.backbone_stage, config.backbone_options, "backbone")


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: SOHOConfig) -> ConvertedBert:
    """Convert a BERT for a SOHO of its sizes; the paper's small models have the first three of its twelve layers.

    bert: its config.json.
    """
    return convert_layout(state, bert, BertSizes.of(config, stack="transformer", head=not config.plain_heads))
