"""Convert BERT's word embeddings to VLMo, and map the blocks that the authors' code, BEiT and timm name alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.convert.bert import BertSizes, ConvertedBert, convert_layout
from vlp_models.models.convert.mapping import StateDictMapping
from vlp_models.models.vlmo.config import VLMoConfig


class VLMoMapping(StateDictMapping):
    """Maps the blocks and patches of the authors' code, whose names are BEiT's and timm's as well."""

    def attention(self, layer: int, source: str, hidden: int) -> None:
        """Map a block's attention, its norm, and the scales of both sub-layers. source: the block's name."""
        target = f"blocks.{layer}"
        self.norm(f"{target}.attention_norm", f"{source}.norm1", hidden)
        # The source has no key bias: it adds the same number to all scores of a query, so zeros compute the same.
        self.weights[f"{target}.attention.qkv.weight"] = self.take(f"{source}.attn.qkv.weight", 3 * hidden, hidden)
        query, value = self.take(f"{source}.attn.q_bias", hidden), self.take(f"{source}.attn.v_bias", hidden)
        self.weights[f"{target}.attention.qkv.bias"] = torch.cat([query, torch.zeros(hidden), value])
        self.linear(f"{target}.attention.out", f"{source}.attn.proj", hidden, hidden)
        if f"{source}.gamma_1" in self.state:
            self.weights[f"{target}.attention_scale"] = self.take(f"{source}.gamma_1", hidden)
            self.weights[f"{target}.expert_scale"] = self.take(f"{source}.gamma_2", hidden)

    def expert(self, layer: int, name: str, norm: str, mlp: str, hidden: int, intermediate: int) -> None:
        target = f"blocks.{layer}.experts.{name}"
        self.norm(f"{target}.norm", norm, hidden)
        self.linear(f"{target}.ffn.0", f"{mlp}.fc1", intermediate, hidden)
        self.linear(f"{target}.ffn.2", f"{mlp}.fc2", hidden, intermediate)

    def patches(self, prefix: str, hidden: int) -> int:
        """Map the patch embedding and [CLS]; return a patch's side in pixels. prefix: of their names."""
        # The kernel of the projection is one patch: (D, 3, P, P).
        patch = self.shape(f"{prefix}patch_embed.proj.weight")[-1]
        weight = self.take(f"{prefix}patch_embed.proj.weight", hidden, 3, patch, patch)
        self.weights["image_embedding.patches.weight"] = weight
        self.weights["image_embedding.patches.bias"] = self.take(f"{prefix}patch_embed.proj.bias", hidden)
        # (1, 1, D) -> (1, D)
        self.weights["image_embedding.cls_1D"] = self.take(f"{prefix}cls_token", 1, 1, hidden).view(-1, hidden)
        return patch


def grid_side(rows: int) -> int:
    """Return the patches along a side of an image whose table of relative position biases has `rows` rows.

    Raises:
        CheckpointError: no square grid has that many.
    """
    # n x n patches have (2 n - 1)^2 different offsets, and [CLS] has three more rows.
    span = math.isqrt(max(0, rows - 3))
    if span * span != rows - 3 or span % 2 == 0:
        raise CheckpointError(f"{rows} rows of relative position biases fit no square grid")
    return (span + 1) // 2


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: VLMoConfig) -> ConvertedBert:
    """Convert a BERT's word embeddings and LM head for a VLMo of its width.

    VLMo's blocks normalize before each sub-layer and BERT's after it, so BERT's blocks are not used; language experts
    learn from texts alone (section 3.4 of the paper). BERT's type 0, which every word of a sentence has, is added to
    the words and so is no parameter that further training shares among them; BERT's positions are used with
    `positions: absolute`.

    bert: its config.json.
    """
    absolute = config.positions == "absolute"
    positions = config.max_positions if absolute else 0
    sizes = BertSizes.of(config, layers=0, max_positions=positions, tied=False, eps=("embedding_norm_eps",))
    converted = convert_layout(state, bert, sizes)
    weights, left_out = dict(converted.weights), [*converted.left_out, "embeddings.token_type_embeddings.weight[1:]"]
    types = weights.pop("text_embedding.types.weight")
    weights["text_embedding.words.weight"] = weights["text_embedding.words.weight"] + types[0]
    if not absolute:
        del weights["text_embedding.positions.weight"]
        left_out.append("embeddings.position_embeddings.weight")
    return dataclasses.replace(converted, weights=weights, left_out=sorted(left_out))
