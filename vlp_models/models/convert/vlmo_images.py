"""BEiT's weights (the authors' names, which are timm's, too) as VLMo's image side: the first stage of its pretraining.

`vlp import-checkpoint beit --name MODEL`: the patch embedding, attention, the vision experts, and each layer's position
biases; the last norm where there is one. Language and vision-language experts stay fresh (section 3.4). A checkpoint of
masked image modelling also brings its mask token and its head of 8,192 codes, to a model with `image_codes: 8192`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.packages import library_of
from vlp_models.errors import CheckpointError
from vlp_models.models.convert.mapping import Asked, Imported, read_state_dict
from vlp_models.models.convert.timm import convert_cnn
from vlp_models.models.convert.vlmo import Layout, grid_of
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.models.vlmo.embeddings import renormalization
from vlp_models.vision.pretrained_weights import data_config, pretrained_model_name, read_backbone_weights

# What VLMo has no place for: classifiers, the norm of mean-pooled patches, indices that follow from the size
IGNORED = ("head.", "fc_norm.", "relative_position_index", "rel_pos_bias.relative_position_index")


def read_beit(file: Path, asked: Asked) -> Imported:
    """For the model that `asked.config` describes.

    Raises:
        CheckpointError: no such file, not of this layout, or of another size than the model.
    """
    return convert_beit(read_state_dict(file), asked)


def convert_beit(state: Mapping[str, Tensor], asked: Asked) -> Imported:
    """
    Raises:
        CheckpointError: names that are missing, left over or misshapen, or sizes that are not the model's.
    """
    c = Layout({name: tensor for name, tensor in state.items() if not name.endswith(".relative_position_index")})
    hidden = c.shape("cls_token")[-1]
    intermediate = c.shape("blocks.0.mlp.fc1.weight")[0]
    layers = max(c.layers(r"blocks\.(\d+)\."), default=0) + 1
    shared = "rel_pos_bias.relative_position_bias_table"
    own = "blocks.{}.attn.relative_position_bias_table"
    rows, heads = c.shape(shared if shared in state else own.format(0))
    grid, patch = grid_of(rows), c.patches("", hidden)
    found: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "intermediate": intermediate,
        "patch": patch,
        "side": grid * patch,
    }
    _check_sizes(found, asked)
    for layer in range(layers):
        c.attention(layer, f"blocks.{layer}", hidden)
        c.expert(layer, "vision", f"blocks.{layer}.norm2", f"blocks.{layer}.mlp", hidden, intermediate)
    tables = [c.taker.take(shared if shared in state else own.format(layer), rows, heads) for layer in range(layers)]
    c.weights["position_bias.image"] = torch.cat(tables, 1).T.contiguous()
    if c.has("norm."):
        c.norm("norm", "norm", hidden)
    codes = int(asked.config.get("image_codes", 0))
    ignored = list(IGNORED)
    if codes and "mask_token" in state and c.has("lm_head."):
        c.weights["image_embedding.hidden_1D"] = c.taker.take("mask_token", 1, 1, hidden).view(1, hidden)
        c.linear("image_head", "lm_head", codes, hidden)
    else:
        ignored += ["mask_token", "lm_head."]
    c.taker.check("BEiT's weights", ignored=tuple(ignored))
    scale = 0.1 if "blocks.0.attention_scale" in c.weights else 0.0
    config = {**asked.config, **found, "layer_scale": asked.config.get("layer_scale", scale) if scale else 0.0}
    return Imported(family="vlmo", what="BEiT", config=config, weights=c.weights, regions=False)


def _check_sizes(found: Mapping[str, Any], asked: Asked) -> None:
    """
    Raises:
        CheckpointError: lists the sizes of the model in params.yaml that are not these weights'.
    """
    wrong = [
        f"{key} {asked.config[key]}, BEiT's {value}"
        for key, value in found.items()
        if key in asked.config and asked.config[key] != value
    ]
    if asked.config.get("positions", "relative") != "relative" or asked.config.get("feed_forward") == "shared":
        wrong.append("positions and feed_forward must be `relative` and `experts`")
    if wrong:
        raise CheckpointError(
            f"BEiT's sizes are not the model's: {'; '.join(wrong)}; set its config to BEiT's. Another `side` is for "
            "the model that starts with these weights, with `interpolate_positions: true`"
        )


# Classifiers, and the norm of mean-pooled patches
VIT_IGNORED = ("head.", "head_dist.", "fc_norm.", "pre_logits.")
BEIT = "relative_position_bias_table"


def read_timm_vit(source: Path, asked: Asked) -> Imported:
    """For the model that `asked.config` describes.

    Raises:
        MissingToolError, CheckpointError: see `read_backbone_weights`; not a ViT, or of another size than the model.
    """
    text = str(source)
    name = text.partition(":")[2] if library_of(text) else ""
    if library_of(text) and not name:
        raise CheckpointError(f"{text}: name the model as well: timm:vit_base_patch16_224, for example")
    state = read_backbone_weights(text, name, asked.root, asked.where)
    notes: tuple[str, ...] = ()
    if name:
        told = data_config(name)
        state = renormalised(state, told["mean"], told["std"])
    else:
        notes = ("the model reads pixels normalised with mean 0.5 and deviation 0.5; were the file's weights, too?",)
    if any(key.endswith(BEIT) for key in state):
        return convert_beit(state, asked)
    return convert_vit(state, asked, notes)


def convert_vit(state: Mapping[str, Tensor], asked: Asked, notes: tuple[str, ...] = ()) -> Imported:
    """
    Raises:
        CheckpointError: names that are missing, left over or misshapen, or sizes that are not the model's.
    """
    c = Layout(state)
    hidden = c.shape("cls_token")[-1]
    intermediate = c.shape("blocks.0.mlp.fc1.weight")[0]
    layers = max(c.layers(r"blocks\.(\d+)\."), default=0) + 1
    places, patch = c.shape("pos_embed")[1], c.patches("", hidden)
    grid = math.isqrt(places)  # one more than a square where [CLS] has a place
    config: dict[str, Any] = {
        "hidden": hidden,
        "heads": asked.heads or asked.config.get("heads", hidden // 64),
        "layers": layers,
        "intermediate": intermediate,
        "patch": patch,
        "side": grid * patch,
        "positions": "absolute",
    }
    _check_vit_sizes(config, asked)
    for layer in range(layers):
        _block(c, layer, hidden, intermediate)
    positions_SD = c.taker.take("pos_embed", 1, places, hidden)[0]
    if places == grid * grid:  # [CLS] has none there
        positions_SD = torch.cat([torch.zeros(1, hidden), positions_SD])
    c.weights["image_embedding.positions_SD"] = positions_SD
    c.weights["image_embedding.type_1D"] = torch.zeros(1, hidden)  # there is none; it is learnt
    if c.has("norm."):
        c.norm("norm", "norm", hidden)
    c.taker.check("a ViT by timm's names", ignored=VIT_IGNORED)
    scaled = "blocks.0.attention_scale" in c.weights
    config |= {"layer_scale": (asked.config.get("layer_scale") or 0.1) if scaled else 0.0}
    return Imported(
        family="vlmo", what="ViT", config={**asked.config, **config}, weights=c.weights, notes=notes, regions=False
    )


def renormalised(state: Mapping[str, Tensor], mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Tensor]:
    """The same network for pixels normalised with 0.5 and 0.5 instead of `mean` and `std`, channel by channel."""
    weight = state.get("patch_embed.proj.weight")
    bias = state.get("patch_embed.proj.bias")
    if weight is None or bias is None or (set(mean), set(std)) == ({HALF}, {HALF}):
        return dict(state)
    means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    wide_DCPP = weight.double()
    scaled = wide_DCPP * (HALF / stds)[:, None, None]
    shifted = bias.double() + (wide_DCPP.sum((2, 3)) * ((HALF - means) / stds)).sum(1)
    return {
        **state,
        "patch_embed.proj.weight": scaled.to(weight.dtype),
        "patch_embed.proj.bias": shifted.to(bias.dtype),
    }


def _block(c: Layout, layer: int, hidden: int, intermediate: int) -> None:
    theirs, ours = f"blocks.{layer}", f"blocks.{layer}"
    c.norm(f"{ours}.attention_norm", f"{theirs}.norm1", hidden)
    c.linear(f"{ours}.attention.qkv", f"{theirs}.attn.qkv", 3 * hidden, hidden)
    c.linear(f"{ours}.attention.out", f"{theirs}.attn.proj", hidden, hidden)
    c.expert(layer, "vision", f"{theirs}.norm2", f"{theirs}.mlp", hidden, intermediate)
    if f"{theirs}.ls1.gamma" in c.taker.state:
        c.weights[f"{ours}.attention_scale"] = c.taker.take(f"{theirs}.ls1.gamma", hidden)
        c.weights[f"{ours}.expert_scale"] = c.taker.take(f"{theirs}.ls2.gamma", hidden)


def _check_vit_sizes(found: Mapping[str, Any], asked: Asked) -> None:
    """
    Raises:
        CheckpointError: lists the sizes of the model in params.yaml that are not these weights'.
    """
    wrong = [
        f"{key} {asked.config[key]}, the ViT's {value}"
        for key, value in found.items()
        if key in asked.config and asked.config[key] != value
    ]
    if asked.config.get("feed_forward") == "shared":
        wrong.append("feed_forward must be `experts`")
    if wrong:
        raise CheckpointError(
            f"the ViT's sizes are not the model's: {'; '.join(wrong)}; set its config to the ViT's. Another `side` is "
            "for the model that starts with these weights, with `interpolate_positions: true`"
        )


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
    name = pretrained_model_name(str(source), config.stem_backbone)
    mean, std = data_config(name)["mean"], data_config(name)["std"]
    weights[f"{STEM}.scale_3"], weights[f"{STEM}.shift_3"] = renormalization(mean, std)
    notes: tuple[str, ...] = ()
    if (set(mean), set(std)) != ({HALF}, {HALF}):
        notes = (f"it gets pixels of mean {tuple(mean)} and deviation {tuple(std)}: timm's data config of {name}",)
    return Imported(family="vlmo", what="a CNN's", config=asked.config, weights=weights, notes=notes, regions=False)
