"""timm's weights as VLMo's image side: a ViT's (timm_vit.py), or those of the CNN before its patches (cnn_stem.py)."""

from __future__ import annotations

from pathlib import Path

from vlp_models.models.foreign import Asked, Imported
from vlp_models.models.pretrained_cnn import convert_cnn
from vlp_models.models.vlmo.cnn_stem import renormalising
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.models.vlmo.timm_vit import read_timm_vit
from vlp_models.vision.weights import data_config, read_backbone_weights, whose

STEM = "image_embedding.stem"


def read_timm_image_side(source: Path, asked: Asked) -> Imported:
    """
    Raises:
        MissingToolError, CheckpointError: see `read_timm_vit` and `read_timm_stem`.
    """
    return (read_timm_stem if asked.config.get("stem") == "timm" else read_timm_vit)(source, asked)


def read_timm_stem(source: Path, asked: Asked) -> Imported:
    """The CNN that `stem_backbone` of `asked.config` names, and how it wants pixels normalised.

    Raises:
        MissingToolError, CheckpointError: see `read_backbone_weights` and `convert_cnn`.
    """
    config = asked.built(VLMoConfig)
    state = read_backbone_weights(str(source), config.stem_backbone, asked.root, asked.where)
    weights = convert_cnn(state, config.stem_backbone, config.stem_stage, {}, f"{STEM}.backbone")
    name = whose(str(source), config.stem_backbone)
    mean, std = data_config(name)["mean"], data_config(name)["std"]
    weights[f"{STEM}.scale_3"], weights[f"{STEM}.shift_3"] = renormalising(mean, std)
    notes: tuple[str, ...] = ()
    if (set(mean), set(std)) != ({HALF}, {HALF}):
        notes = (f"it gets pixels of mean {tuple(mean)} and deviation {tuple(std)}: timm's data config of {name}",)
    return Imported(family="vlmo", what="a CNN's", config=asked.config, weights=weights, notes=notes, regions=False)
