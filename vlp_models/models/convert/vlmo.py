"""Checkpoints of the public VLMo code: every weight by its name here, and the config that computes the same with them.

`vlp import-checkpoint vlmo`. One layout serves its checkpoints of pretraining (the second stage's and the last's), of
retrieval, VQA and NLVR2, which differ in their heads. Two things need arithmetic: BERT's token type, of which only row
0 is ever used, is added to the word embeddings; attention there has no key bias, which here is zero and does nothing.

Left out, and named in preset.yaml: absolute positions of texts where biases are relative (there, too, they are weights
that nothing reads).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.convert.bert import BertSizes, Converted, convert
from vlp_models.models.convert.mapping import Asked, Imported, Taker, read_state_dict
from vlp_models.models.vlmo.config import VLMoConfig

TEXT_ROWS = 392  # of the table of biases, always: 389 offsets of texts of 196 tokens, and 3 of [CLS]
# Indices into the table and places: what they hold follows from the sizes.
INDICES = (
    "relative_position_index",
    "text_relative_position_index",
    "text_imag_relative_position_index",
    "text_embeddings.position_ids",
)
EXPERTS = {"vision": "imag", "language": "text", "vision_language": "vl"}
HEADS = {544: 16}  # of the size base_plus; elsewhere a head is 64 wide
_NOTES = (
    "Pairs of one image are each other's negatives in the public code. Pretraining from here has them so; fine-tuning",
    "for retrieval, by embeddings, does with options.same_image_negatives: true.",
)


class Layout:
    """Takes weights by their names there, to names here."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.taker = Taker(state)
        self.weights: dict[str, Tensor] = {}

    def has(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self.taker.state)

    def shape(self, name: str) -> tuple[int, ...]:
        """
        Raises:
            CheckpointError: a tensor without which the sizes are not known is missing.
        """
        tensor = self.taker.state.get(name)
        if tensor is None:
            raise CheckpointError(f"not a checkpoint of this layout: it has no `{name}`")
        return tuple(tensor.shape)

    def linear(self, ours: str, theirs: str, outputs: int, inputs: int, *, bias: bool = True) -> None:
        self.weights[f"{ours}.weight"] = self.taker.take(f"{theirs}.weight", outputs, inputs)
        if bias:
            self.weights[f"{ours}.bias"] = self.taker.take(f"{theirs}.bias", outputs)

    def norm(self, ours: str, theirs: str, size: int) -> None:
        self.weights[f"{ours}.weight"] = self.taker.take(f"{theirs}.weight", size)
        self.weights[f"{ours}.bias"] = self.taker.take(f"{theirs}.bias", size)

    def attention(self, layer: int, theirs: str, hidden: int) -> None:
        """And the layer's shared norm and scales. theirs: the block's name."""
        take, ours = self.taker.take, f"blocks.{layer}"
        self.norm(f"{ours}.attention_norm", f"{theirs}.norm1", hidden)
        self.weights[f"{ours}.attention.qkv.weight"] = take(f"{theirs}.attn.qkv.weight", 3 * hidden, hidden)
        query, value = take(f"{theirs}.attn.q_bias", hidden), take(f"{theirs}.attn.v_bias", hidden)
        self.weights[f"{ours}.attention.qkv.bias"] = torch.cat([query, torch.zeros(hidden), value])
        self.linear(f"{ours}.attention.out", f"{theirs}.attn.proj", hidden, hidden)
        if f"{theirs}.gamma_1" in self.taker.state:
            self.weights[f"{ours}.attention_scale"] = take(f"{theirs}.gamma_1", hidden)
            self.weights[f"{ours}.expert_scale"] = take(f"{theirs}.gamma_2", hidden)

    def expert(self, layer: int, name: str, norm: str, mlp: str, hidden: int, intermediate: int) -> None:
        ours = f"blocks.{layer}.experts.{name}"
        self.norm(f"{ours}.norm", norm, hidden)
        self.linear(f"{ours}.ffn.0", f"{mlp}.fc1", intermediate, hidden)
        self.linear(f"{ours}.ffn.2", f"{mlp}.fc2", hidden, intermediate)

    def patches(self, theirs: str, hidden: int) -> int:
        """The patch embedding and [CLS]; returns a patch's side. theirs: what stands before their names."""
        patch = self.shape(f"{theirs}patch_embed.proj.weight")[-1]
        weight = self.taker.take(f"{theirs}patch_embed.proj.weight", hidden, 3, patch, patch)
        self.weights["image_embedding.patches.weight"] = weight
        self.weights["image_embedding.patches.bias"] = self.taker.take(f"{theirs}patch_embed.proj.bias", hidden)
        self.weights["image_embedding.cls_1D"] = self.taker.take(f"{theirs}cls_token", 1, 1, hidden).view(-1, hidden)
        return patch

    def layers(self, pattern: str) -> list[int]:
        """The numbers that a pattern's group finds in the names."""
        return sorted({int(m[1]) for name in self.taker.state if (m := re.match(pattern, name))})


def grid_of(rows: int) -> int:
    """Patches along a side, of a table of an image's biases with so many rows.

    Raises:
        CheckpointError: no grid has so many.
    """
    span = math.isqrt(max(0, rows - 3))
    if span * span != rows - 3 or span % 2 == 0:
        raise CheckpointError(f"{rows} rows of relative position biases are those of no square grid")
    return (span + 1) // 2


def read_vlmo(file: Path, asked: Asked) -> Imported:
    """A checkpoint of microsoft/unilm's vlmo: the state dict, or a dict that holds it.

    Raises:
        CheckpointError: no such file, or not of this layout; lists what is missing, left over or misshapen.
    """
    return convert_vlmo(read_state_dict(file), asked)


def convert_vlmo(state: Mapping[str, Tensor], asked: Asked) -> Imported:
    """
    Raises:
        CheckpointError: not of this layout, or `asked.task` is not what its heads are for.
    """
    c = Layout(state)
    take, weights = c.taker.take, c.weights
    hidden = c.shape("transformer.cls_token")[-1]
    vocab = c.shape("text_embeddings.word_embeddings.weight")[0]
    intermediate = c.shape("transformer.blocks.0.mlp_imag.fc1.weight")[0]
    layers = max(c.layers(r"transformer\.blocks\.(\d+)\."), default=0) + 1
    fused = c.layers(r"transformer\.blocks\.(\d+)\.mlp_vl\.")
    heads, left_out = asked.heads or HEADS.get(hidden, hidden // 64), []
    patch = c.patches("transformer.", hidden)
    for layer in range(layers):
        block = f"transformer.blocks.{layer}"
        c.attention(layer, block, hidden)
        for ours, theirs in EXPERTS.items():
            if ours != "vision_language" or layer >= (fused[0] if fused else layers):
                c.expert(layer, ours, f"{block}.norm2_{theirs}", f"{block}.mlp_{theirs}", hidden, intermediate)
    c.norm("norm", "transformer.norm", hidden)

    types = c.shape("text_embeddings.token_type_embeddings.weight")[0]
    bert_type = take("text_embeddings.token_type_embeddings.weight", types, hidden)[:1]
    weights["text_embedding.words.weight"] = take("text_embeddings.word_embeddings.weight", vocab, hidden) + bert_type
    c.norm("text_embedding.norm", "text_embeddings.LayerNorm", hidden)
    modules = c.shape("token_type_embeddings.weight")[0]
    type_rows = take("token_type_embeddings.weight", modules, hidden)
    weights["text_embedding.type_1D"], weights["image_embedding.type_1D"] = type_rows[:1], type_rows[1:2]
    if modules > 2:
        weights["image_embedding.second_type_1D"] = type_rows[2:3]

    length = c.shape("text_embeddings.position_embeddings.weight")[0]
    text_places = take("text_embeddings.position_embeddings.weight", length, hidden)
    relative = "relative_position_bias_table" in state
    if relative:
        rows, columns = c.shape("relative_position_bias_table")
        if columns != layers * heads:
            raise CheckpointError(f"biases of {columns} heads in {layers} layers, not {heads} each; give --heads")
        table = take("relative_position_bias_table", rows, columns).T.contiguous()
        image_rows = rows - TEXT_ROWS - 2
        grid, length = grid_of(image_rows), TEXT_ROWS // 2
        weights["position_bias.image"] = table[:, :image_rows].contiguous()
        weights["position_bias.cross"] = table[:, image_rows : image_rows + 2].contiguous()
        weights["position_bias.text"] = table[:, image_rows + 2 :].contiguous()
        left_out.append("text_embeddings.position_embeddings.weight, which nothing reads")
    else:
        places = c.shape("transformer.pos_embed")[1]
        grid = math.isqrt(places - 1)
        weights["image_embedding.positions_SD"] = take("transformer.pos_embed", 1, places, hidden)[0]
        weights["text_embedding.positions.weight"] = text_places

    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "intermediate": intermediate,
        "vl_start": fused[0] if fused else layers,
        "side": grid * patch,
        "patch": patch,
        "max_positions": length,
        "positions": "relative" if relative else "absolute",
        "layer_scale": 0.1 if "blocks.0.attention_scale" in weights else 0.0,
        "max_scale": 0.0,
        "same_image_negatives": True,
        "whole_words": True,
        "second_image_type": modules > 2,
        "image_codes": 0,
    }
    config |= _heads(c, hidden, vocab)
    head, task = _classifier(c, hidden, config)
    if asked.task and task != asked.task:
        raise CheckpointError(
            f"the weights are {'a ' + task if task else 'no task'}'s, not {asked.task}'s, as --task says"
        )
    c.taker.taken |= {name for name in INDICES if name in state}
    c.taker.check("a checkpoint of the public VLMo code")
    return Imported(
        family="vlmo",
        what=f"VLMo's {task or 'pretraining'}",
        config=config,
        weights=weights,
        task=task or None,
        head=head,
        notes=(*(f"left out: {name}" for name in left_out), *_NOTES),
        regions=False,
    )


def _heads(c: Layout, hidden: int, vocab: int) -> dict[str, Any]:
    """Of the objectives, each where it is there; returns what of the config follows."""
    take, weights, config = c.taker.take, c.weights, {}
    if c.has("pooler."):
        c.linear("pooler", "pooler.dense", hidden, hidden)
    if c.has("itm_score."):
        c.linear("match_head", "itm_score.fc", 2, hidden)
    if c.has("mlm_score."):
        c.linear("word_head.dense", "mlm_score.transform.dense", hidden, hidden)
        c.norm("word_head.norm", "mlm_score.transform.LayerNorm", hidden)
        weights["word_head.weight"] = take("mlm_score.decoder.weight", vocab, hidden)
        weights["word_head.bias"] = take("mlm_score.bias", vocab)
    for ours, theirs in (("", ""), ("fused_", "vl_")):
        if c.has(f"itc_{theirs}image_proj."):
            for side in ("image", "text"):
                c.linear(f"{ours}{side}_projection", f"itc_{theirs}{side}_proj.fc", hidden, hidden, bias=False)
            weights[f"{ours}log_scale"] = take(f"logit_{theirs}scale")
            config["contrast"] = "both" if theirs else "unimodal"
    return config


def _classifier(c: Layout, hidden: int, config: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The weights of a task's classifier, and the task; of VQA's two layers the first becomes the model's."""
    if c.has("nlvr2_classifier."):
        c.linear("head.0", "nlvr2_classifier.0", 2 * hidden, 2 * hidden)
        c.norm("head.1", "nlvr2_classifier.1", 2 * hidden)
        c.linear("head.3", "nlvr2_classifier.3", 2, 2 * hidden)
        task = "nlvr2"
    elif c.has("vqa_classifier."):
        config["classifier"] = "mlp"
        c.linear("before_classifier.0", "vqa_classifier.0", 2 * hidden, hidden)
        c.norm("before_classifier.1", "vqa_classifier.1", 2 * hidden)
        answers = c.shape("vqa_classifier.3.weight")[0]
        c.linear("head", "vqa_classifier.3", answers, 2 * hidden)
        task = "vqa"
    else:
        return {}, ""
    names = [name for name in c.weights if name.startswith("head.")]
    return {name.removeprefix("head."): c.weights.pop(name) for name in names}, task


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: VLMoConfig) -> Converted:
    """For a VLMo as wide as BERT. BERT's first token type, which every word of a sentence has, becomes part of each
    word; its positions find a place in a model with `positions: absolute`.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    absolute = config.positions == "absolute"
    positions = config.max_positions if absolute else 0
    sizes = BertSizes.of(config, layers=0, max_positions=positions, tied=False, eps=("embedding_norm_eps",))
    converted = convert(state, bert, sizes)
    weights, left_out = dict(converted.weights), [*converted.left_out, "embeddings.token_type_embeddings.weight[1:]"]
    types = weights.pop("text_embedding.types.weight")
    weights["text_embedding.words.weight"] = weights["text_embedding.words.weight"] + types[0]
    if not absolute:
        del weights["text_embedding.positions.weight"]
        left_out.append("embeddings.position_embeddings.weight")
    return dataclasses.replace(converted, weights=weights, left_out=sorted(left_out))
