"""BEiT's weights (the authors' names, which are timm's, too) as VLMo's image side: the first stage of its pretraining.

`vlp import-checkpoint beit --name MODEL`: the patch embedding, attention, the vision experts, and each layer's position
biases; the last norm where there is one. Language and vision-language experts stay fresh (section 3.4). A checkpoint of
masked image modelling also brings its mask token and its head of 8,192 codes, to a model with `image_codes: 8192`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Asked, Imported, read_state_dict
from vlp_models.models.vlmo.public.convert import Layout, grid_of

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
