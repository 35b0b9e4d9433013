"""Convert BEiT's and timm's weights to VLMo's image side: the first stage of its pretraining.

- BEiT (the authors' names, which are timm's as well): patch embedding, attention, vision experts, each layer's position
  biases, and the last norm if there is one; `vlp import-checkpoint beit --name MODEL`. A checkpoint of masked image
  modeling also brings its mask token and its head of 8,192 codes to a model with `image_codes: 8192`.
- ViT, DeiT (timm's names): the same with absolute positions, so the model needs `positions: absolute`.
- A CNN of timm's before the patches (`stem: timm`).

The language and vision-language experts keep their initialization (section 3.4 of the paper). With these weights the
image side alone computes what the ViT computes. VLMo reads pixels normalized with mean 0.5 and deviation 0.5. If timm's
data config of the named weights differs, the difference goes into the projection of the patches, which is linear and
has no padding, so the outputs stay the same. The CNN's convolutions pad with zeros: there it is a scale and shift
before the CNN. A plain file does not store how its pixels were normalized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.packages import library_of
from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.bert import choose_heads
from vlp_models.contrib.public_weights.timm import convert_cnn
from vlp_models.contrib.public_weights.vlmo import VLMoMapping, grid_side
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.models.vlmo.embeddings import renormalization
from vlp_models.vision.pretrained_weights import data_config, pretrained_model_name, read_backbone_weights

# Classifiers, the norm of mean-pooled patches, and indices that follow from the size
BEIT_IGNORED = ("head.", "fc_norm.", "relative_position_index", "rel_pos_bias.relative_position_index")
VIT_IGNORED = ("head.", "head_dist.", "fc_norm.", "pre_logits.")
SHARED_TABLE, LAYER_TABLE = "rel_pos_bias.relative_position_bias_table", "blocks.{}.attn.relative_position_bias_table"
STEM = "image_embedding.stem"


def read_beit(file: Path, request: ImportRequest) -> ImportedModel:
    """Read BEiT's weights for the model that `request.config` describes.

    Raises:
        CheckpointError: no such file, another layout, or other sizes than the model's.
    """
    return convert_beit(read_state_dict(file), request)


def convert_beit(state: Mapping[str, Tensor], request: ImportRequest) -> ImportedModel:
    """Convert BEiT's weights.

    Raises:
        CheckpointError: names are missing, unexpected or misshapen, or sizes differ from the model's.
    """
    mapping = VLMoMapping({name: t for name, t in state.items() if not name.endswith(".relative_position_index")})
    hidden = mapping.shape("cls_token")[-1]
    intermediate = mapping.shape("blocks.0.mlp.fc1.weight")[0]
    layers = max(mapping.numbers(r"blocks\.(\d+)\."), default=0) + 1
    shared = SHARED_TABLE in state
    rows, heads = mapping.shape(SHARED_TABLE if shared else LAYER_TABLE.format(0))
    patch = mapping.patches("", hidden)
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "intermediate": intermediate,
        "patch": patch,
        "side": grid_side(rows) * patch,
    }
    other = request.config.get("positions", "relative") != "relative" or request.config.get("feed_forward") == "shared"
    _check_sizes(
        "BEiT", sizes, request, ["positions and feed_forward must be `relative` and `experts`"] if other else []
    )

    for layer in range(layers):
        mapping.attention(layer, f"blocks.{layer}", hidden)
        mapping.expert(layer, "vision", f"blocks.{layer}.norm2", f"blocks.{layer}.mlp", hidden, intermediate)
    # Biases of each layer, or one table that all layers share
    tables = [mapping.take(SHARED_TABLE if shared else LAYER_TABLE.format(i), rows, heads) for i in range(layers)]
    # [rows, heads] of each layer -> [layers * heads, rows]
    mapping.weights["position_bias.image"] = torch.cat(tables, 1).T.contiguous()
    if mapping.has("norm."):
        mapping.norm("norm", "norm", hidden)
    codes = int(request.config.get("image_codes", 0))
    ignored = list(BEIT_IGNORED)
    if codes and "mask_token" in state and mapping.has("lm_head."):
        mapping.weights["image_embedding.hidden_1D"] = mapping.take("mask_token", 1, 1, hidden).view(1, hidden)
        mapping.linear("image_head", "lm_head", codes, hidden)
    else:
        ignored += ["mask_token", "lm_head."]
    mapping.check("BEiT's weights", ignored=tuple(ignored))
    # The model has layer scales if the file has some; 0.1 is BEiT's initial value.
    scale = 0.1 if "blocks.0.attention_scale" in mapping.weights else 0.0
    layer_scale = request.config.get("layer_scale", scale) if scale else 0.0
    config = {**request.config, **sizes, "layer_scale": layer_scale}
    return ImportedModel(family="vlmo", origin="BEiT", config=config, weights=mapping.weights, reads_regions=False)


def read_timm_weights(source: Path, request: ImportRequest) -> ImportedModel:
    """Read the CNN of a model with `stem: timm`, or a ViT for the image side of any other."""
    if request.config.get("stem") == "timm":
        return read_timm_stem(source, request)
    text = str(source)
    name = text.partition(":")[2] if library_of(text) else ""
    if library_of(text) and not name:
        raise CheckpointError(f"{text}: name the model as well: timm:vit_base_patch16_224, for example")
    state = read_backbone_weights(text, name, request.root, request.where)
    notes: tuple[str, ...] = ()
    if name:
        data = data_config(name)
        state = renormalize_patches(state, data["mean"], data["std"])
    else:
        notes = ("the model reads pixels normalized with mean 0.5 and deviation 0.5; check that the file's did, too",)
    if any(key.endswith("relative_position_bias_table") for key in state):
        return convert_beit(state, request)
    return convert_vit(state, request, notes)


def convert_vit(state: Mapping[str, Tensor], request: ImportRequest, notes: tuple[str, ...] = ()) -> ImportedModel:
    """Convert a ViT's weights by timm's names.

    Raises:
        CheckpointError: names are missing, unexpected or misshapen, or sizes differ from the model's.
    """
    mapping = VLMoMapping(state)
    hidden = mapping.shape("cls_token")[-1]
    intermediate = mapping.shape("blocks.0.mlp.fc1.weight")[0]
    layers = max(mapping.numbers(r"blocks\.(\d+)\."), default=0) + 1
    places, patch = mapping.shape("pos_embed")[1], mapping.patches("", hidden)
    grid = math.isqrt(places)  # places is grid * grid, or one more if [CLS] has a position
    config: dict[str, Any] = {
        "hidden": hidden,
        "heads": choose_heads(request.heads or request.config.get("heads", 0), hidden),
        "layers": layers,
        "intermediate": intermediate,
        "patch": patch,
        "side": grid * patch,
        "positions": "absolute",
    }
    shared_experts = request.config.get("feed_forward") == "shared"
    _check_sizes("the ViT", config, request, ["feed_forward must be `experts`"] if shared_experts else [])

    for layer in range(layers):
        block = f"blocks.{layer}"
        mapping.norm(f"{block}.attention_norm", f"{block}.norm1", hidden)
        mapping.linear(f"{block}.attention.qkv", f"{block}.attn.qkv", 3 * hidden, hidden)
        mapping.linear(f"{block}.attention.out", f"{block}.attn.proj", hidden, hidden)
        mapping.expert(layer, "vision", f"{block}.norm2", f"{block}.mlp", hidden, intermediate)
        if f"{block}.ls1.gamma" in state:
            mapping.weights[f"{block}.attention_scale"] = mapping.take(f"{block}.ls1.gamma", hidden)
            mapping.weights[f"{block}.expert_scale"] = mapping.take(f"{block}.ls2.gamma", hidden)
    positions_SD = mapping.take("pos_embed", 1, places, hidden)[0]
    if places == grid * grid:  # [CLS] has no position in this ViT
        positions_SD = torch.cat([torch.zeros(1, hidden), positions_SD])
    mapping.weights["image_embedding.positions_SD"] = positions_SD
    mapping.weights["image_embedding.type_1D"] = torch.zeros(1, hidden)  # a ViT has none: it starts at zero
    if mapping.has("norm."):
        mapping.norm("norm", "norm", hidden)
    mapping.check("a ViT by timm's names", ignored=VIT_IGNORED)
    scaled = "blocks.0.attention_scale" in mapping.weights
    config |= {"layer_scale": (request.config.get("layer_scale") or 0.1) if scaled else 0.0}
    return ImportedModel(
        family="vlmo",
        origin="ViT",
        config={**request.config, **config},
        weights=mapping.weights,
        notes=notes,
        reads_regions=False,
    )


def renormalize_patches(
    state: Mapping[str, Tensor], mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Tensor]:
    """Change a ViT's patch projection so that pixels normalized with 0.5 and 0.5 give what pixels normalized with
    `mean` and `std` gave."""
    weight = state.get("patch_embed.proj.weight")
    bias = state.get("patch_embed.proj.bias")
    if weight is None or bias is None or (set(mean), set(std)) == ({HALF}, {HALF}):
        return dict(state)
    means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    # W (0.5 x' + 0.5 - mean) / std + b for pixels x' = (x - 0.5) / 0.5: scale W, and add its sums to b.
    wide_DCPP = weight.double()
    scaled = wide_DCPP * (HALF / stds)[:, None, None]
    shifted = bias.double() + (wide_DCPP.sum((2, 3)) * ((HALF - means) / stds)).sum(1)
    return {
        **state,
        "patch_embed.proj.weight": scaled.to(weight.dtype),
        "patch_embed.proj.bias": shifted.to(bias.dtype),
    }


def read_timm_stem(source: Path, request: ImportRequest) -> ImportedModel:
    """Read the CNN that `stem_backbone` of `request.config` names, with the normalization of its pixels."""
    config = request.build_config(VLMoConfig)
    state = read_backbone_weights(str(source), config.stem_backbone, request.root, request.where)
    weights = convert_cnn(state, config.stem_backbone, config.stem_stage, {}, f"{STEM}.backbone")
    name = pretrained_model_name(str(source), config.stem_backbone)
    mean, std = data_config(name)["mean"], data_config(name)["std"]
    weights[f"{STEM}.scale_3"], weights[f"{STEM}.shift_3"] = renormalization(mean, std)
    notes: tuple[str, ...] = ()
    if (set(mean), set(std)) != ({HALF}, {HALF}):
        notes = (f"its pixels have mean {tuple(mean)} and deviation {tuple(std)}: timm's data config of {name}",)
    return ImportedModel(
        family="vlmo", origin="a CNN's", config=request.config, weights=weights, notes=notes, reads_regions=False
    )


def _check_sizes(origin: str, sizes: Mapping[str, Any], request: ImportRequest, wrong: list[str]) -> None:
    """Check the sizes of the weights against the model in params.yaml. wrong: other reasons why they do not fit."""
    differences = [
        f"{key} {request.config[key]}, {origin}'s {value}"
        for key, value in sizes.items()
        if key in request.config and request.config[key] != value
    ]
    if differences or wrong:
        raise CheckpointError(
            f"{origin}'s sizes are not the model's: {'; '.join([*differences, *wrong])}; set its config to {origin}'s. "
            "For another `side`, start a second model from these weights with `interpolate_positions: true`"
        )
