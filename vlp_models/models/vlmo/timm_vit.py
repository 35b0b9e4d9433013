"""A timm ViT (ViT, DeiT, BEiT) as VLMo's image side: patches, positions, attention, the vision experts, the last norm.

Alone, images then compute what they do there. ViT's positions are absolute, so the model's must be; BEiT's are relative
(public/beit.py). Where timm tells how pixels are normalised, and VLMo does it otherwise, the difference goes into the
patches' projection, which is linear and has no padding: the sums stay the same. A file does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.weight_files import library_of
from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Asked, Imported
from vlp_models.models.vlmo.config import HALF
from vlp_models.models.vlmo.public.beit import convert_beit
from vlp_models.models.vlmo.public.convert import Layout
from vlp_models.vision.weights import data_config, read_backbone_weights

# Classifiers, and the norm of mean-pooled patches
IGNORED = ("head.", "head_dist.", "fc_norm.", "pre_logits.")
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
    _check_sizes(config, asked)
    for layer in range(layers):
        _block(c, layer, hidden, intermediate)
    positions_SD = c.taker.take("pos_embed", 1, places, hidden)[0]
    if places == grid * grid:  # [CLS] has none there
        positions_SD = torch.cat([torch.zeros(1, hidden), positions_SD])
    c.weights["image_embedding.positions_SD"] = positions_SD
    c.weights["image_embedding.type_1D"] = torch.zeros(1, hidden)  # there is none; it is learnt
    if c.has("norm."):
        c.norm("norm", "norm", hidden)
    c.taker.check("a ViT by timm's names", ignored=IGNORED)
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


def _check_sizes(found: Mapping[str, Any], asked: Asked) -> None:
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
