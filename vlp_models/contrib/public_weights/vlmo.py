"""Convert the authors' checkpoints (microsoft/unilm, vlmo), and BERT's word embeddings, to VLMo.

`vlp import-checkpoint vlmo`. One layout serves the checkpoints of pretraining (the second stage's and the last's),
retrieval, VQA and NLVR2, which differ in their heads. Two things need arithmetic: BERT's token type 0, the only one
that is used, is added to the word embeddings; attention there has no key bias, which is zero here and has no effect.

The sum leaves every output unchanged, but further training differs: there the type is a parameter of its own that all
words share, here each word's embedding is trained alone. With weight decay or another learning rate for a parameter, a
word that is rare in the new data keeps its part of the imported type while frequent words move.

Left out: absolute positions of texts if the model has relative biases (the authors' code
stores them as well and never reads them).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.bert import BertSizes, ConvertedBert, choose_heads, convert_layout
from vlp_models.contrib.public_weights.mapping import StateDictMapping
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.vlmo.config import VLMoConfig

TEXT_ROWS = 392  # of the table of biases, always: 389 offsets of texts of 196 tokens, and 3 of [CLS]
# Indices into the tables, and positions: they follow from the sizes.
INDICES = (
    "relative_position_index",
    "text_relative_position_index",
    "text_imag_relative_position_index",
    "text_embeddings.position_ids",
)
EXPERTS = {"vision": "imag", "language": "text", "vision_language": "vl"}
HEADS = {544: 16}  # attention heads of the size base_plus; in the other sizes a head is 64 wide
_NOTES = (
    "Pairs of one image are each other's negatives in the authors' code. Pretraining from here does the same; for",
    "fine-tuning retrieval by embeddings set options.same_image_negatives: true.",
)


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


def read_vlmo(file: Path, request: ImportRequest) -> ImportedModel:
    """Read a checkpoint of microsoft/unilm's vlmo: the state dict, or a dict that holds it.

    Raises:
        CheckpointError: no such file, or another layout; lists what is missing, unexpected or misshapen.
    """
    return convert_vlmo(read_state_dict(file), request)


def convert_vlmo(state: Mapping[str, Tensor], request: ImportRequest) -> ImportedModel:
    """Convert a checkpoint of the authors' code.

    Raises:
        CheckpointError: another layout, or `request.task` is not what its heads are for.
    """
    mapping = VLMoMapping(state)
    hidden = mapping.shape("transformer.cls_token")[-1]
    vocab = mapping.shape("text_embeddings.word_embeddings.weight")[0]
    intermediate = mapping.shape("transformer.blocks.0.mlp_imag.fc1.weight")[0]
    layers = max(mapping.numbers(r"transformer\.blocks\.(\d+)\."), default=0) + 1
    # Layers with a vision-language expert are the last ones: the first of them is where fusion starts.
    fused = mapping.numbers(r"transformer\.blocks\.(\d+)\.mlp_vl\.")
    vl_start = fused[0] if fused else layers
    patch = mapping.patches("transformer.", hidden)
    for layer in range(layers):
        block = f"transformer.blocks.{layer}"
        mapping.attention(layer, block, hidden)
        for name, source in EXPERTS.items():
            # Lower layers have no vision-language expert.
            if name != "vision_language" or layer >= vl_start:
                mapping.expert(layer, name, f"{block}.norm2_{source}", f"{block}.mlp_{source}", hidden, intermediate)
    mapping.norm("norm", "transformer.norm", hidden)

    relative = "relative_position_bias_table" in state
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden": hidden,
        "heads": choose_heads(request.heads or HEADS.get(hidden, 0), hidden),
        "layers": layers,
        "intermediate": intermediate,
        "vl_start": vl_start,
        "patch": patch,
        # A model with relative biases reads no absolute positions, although the file has them.
        "positions": "relative" if relative else "absolute",
        "layer_scale": 0.1 if "blocks.0.attention_scale" in mapping.weights else 0.0,
        "max_scale": 0.0,
        "same_image_negatives": True,
        "whole_words": True,
        "image_codes": 0,
    }
    config |= _map_embeddings(mapping, config)
    config |= _map_heads(mapping, hidden, vocab)
    head, task = _map_classifier(mapping, hidden, config)
    if request.task and task != request.task:
        model = f"a {task} model" if task else "no task"
        raise CheckpointError(f"the weights are of {model}, not of a {request.task} model as --task claims")
    # Tables of indices follow from the sizes: mark them as read so that `check` does not report them.
    mapping.taken |= {name for name in INDICES if name in state}
    mapping.check("a checkpoint of the authors' VLMo code")
    return ImportedModel(
        family="vlmo",
        origin=f"VLMo's {task or 'pretraining'}",
        config=config,
        weights=mapping.weights,
        task=task or None,
        head=head,
        # Without relative biases the positions of texts are read.
        left_out=("text_embeddings.position_embeddings.weight",) if relative else (),
        notes=_NOTES,
        reads_regions=False,
    )


def _map_embeddings(mapping: VLMoMapping, config: Mapping[str, Any]) -> dict[str, Any]:
    """Map words, types and positions; return the config keys that follow from them."""
    take, weights, hidden = mapping.take, mapping.weights, config["hidden"]
    # BERT's type 0 belongs to every word: its vector becomes a part of each word's.
    # (T, D) -> (1, D): row 0.
    types = mapping.shape("text_embeddings.token_type_embeddings.weight")[0]
    bert_type = take("text_embeddings.token_type_embeddings.weight", types, hidden)[:1]
    words = take("text_embeddings.word_embeddings.weight", config["vocab_size"], hidden)
    weights["text_embedding.words.weight"] = words + bert_type
    mapping.norm("text_embedding.norm", "text_embeddings.LayerNorm", hidden)
    modules = mapping.shape("token_type_embeddings.weight")[0]  # text, image, and NLVR2's second image
    type_rows = take("token_type_embeddings.weight", modules, hidden)
    # (T, D) -> (1, D) each: text, image and the second image of NLVR2.
    weights["text_embedding.type_1D"], weights["image_embedding.type_1D"] = type_rows[:1], type_rows[1:2]
    if modules > 2:
        weights["image_embedding.second_type_1D"] = type_rows[2:3]

    length = mapping.shape("text_embeddings.position_embeddings.weight")[0]
    text_positions = take("text_embeddings.position_embeddings.weight", length, hidden)
    if config["positions"] == "relative":
        rows, columns = mapping.shape("relative_position_bias_table")
        if columns != config["layers"] * config["heads"]:
            raise CheckpointError(
                f"biases of {columns} heads in {config['layers']} layers, not {config['heads']} each; give --heads"
            )
        # [rows, layers * heads] -> [layers * heads, rows]: image to image, between the two, text to text
        table = take("relative_position_bias_table", rows, columns).T.contiguous()
        # The two rows between are the biases from text to image and from image to text.
        image_rows = rows - TEXT_ROWS - 2
        # Texts of 196 tokens, [CLS] included, have 2 * 195 - 1 = 389 offsets and 3 rows of [CLS]: half of 392 is the
        # length.
        grid, length = grid_side(image_rows), TEXT_ROWS // 2
        weights["position_bias.image"] = table[:, :image_rows].contiguous()
        weights["position_bias.cross"] = table[:, image_rows : image_rows + 2].contiguous()
        weights["position_bias.text"] = table[:, image_rows + 2 :].contiguous()
    else:
        places = mapping.shape("transformer.pos_embed")[1]
        # One position is [CLS], the others form a square grid.
        grid = math.isqrt(places - 1)
        weights["image_embedding.positions_SD"] = take("transformer.pos_embed", 1, places, hidden)[0]
        weights["text_embedding.positions.weight"] = text_positions
    return {"side": grid * config["patch"], "max_positions": length, "second_image_type": modules > 2}


def _map_heads(mapping: VLMoMapping, hidden: int, vocab: int) -> dict[str, Any]:
    """Map the objectives' heads that are present; return the config keys that follow from them."""
    take, weights = mapping.take, mapping.weights
    config: dict[str, Any] = {}
    if mapping.has("pooler."):
        mapping.linear("pooler", "pooler.dense", hidden, hidden)
    if mapping.has("itm_score."):
        mapping.linear("match_head", "itm_score.fc", 2, hidden)
    if mapping.has("mlm_score."):
        mapping.linear("word_head.dense", "mlm_score.transform.dense", hidden, hidden)
        mapping.norm("word_head.norm", "mlm_score.transform.LayerNorm", hidden)
        weights["word_head.weight"] = take("mlm_score.decoder.weight", vocab, hidden)
        weights["word_head.bias"] = take("mlm_score.bias", vocab)
    # Two contrastive heads: of each side alone, and of the fused layers (`vl_`).
    for name, source in (("", ""), ("fused_", "vl_")):
        if mapping.has(f"itc_{source}image_proj."):
            for side in ("image", "text"):
                mapping.linear(f"{name}{side}_projection", f"itc_{source}{side}_proj.fc", hidden, hidden, bias=False)
            weights[f"{name}log_scale"] = take(f"logit_{source}scale")
            # The fused pair comes second, so `both` replaces `unimodal`.
            config["contrast"] = "both" if source else "unimodal"
    return config


def _map_classifier(mapping: VLMoMapping, hidden: int, config: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Return a task's classifier and the task; the first of VQA's two layers becomes part of the model."""
    if mapping.has("nlvr2_classifier."):
        # NLVR2 reads two [CLS] vectors, one per image: 2D inputs.
        mapping.linear("head.0", "nlvr2_classifier.0", 2 * hidden, 2 * hidden)
        mapping.norm("head.1", "nlvr2_classifier.1", 2 * hidden)
        mapping.linear("head.3", "nlvr2_classifier.3", 2, 2 * hidden)
        return mapping.pop_head(), "nlvr2"
    if mapping.has("vqa_classifier."):
        config["classifier"] = "mlp"
        mapping.linear("before_classifier.0", "vqa_classifier.0", 2 * hidden, hidden)
        mapping.norm("before_classifier.1", "vqa_classifier.1", 2 * hidden)
        mapping.linear("head", "vqa_classifier.3", mapping.shape("vqa_classifier.3.weight")[0], 2 * hidden)
        return mapping.pop_head(), "vqa"
    return {}, ""


# ---- BERT ------------------------------------------------------------------------------------------------------------


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
