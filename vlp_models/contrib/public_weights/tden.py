"""Convert the authors' checkpoints (YehLi/xmodaler), and BERT's weights, to TDEN.

A checkpoint of the authors is of pretraining, captioning, retrieval, VQA or VCR, and its architecture is the authors'
(`PublicSwitches` in tden/config.py). VQA and VCR are distinguished by their classifier: a single row scores one choice
of VCR, several rows are VQA's answers. Two things have no counterpart here:
- The third row of the token types, which no task uses, is left out.
- LayerDrop, and dropout after a feed-forward net's activation and in the poolers at rates of their own, matter in
  training only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.bert import (
    ENCODER_BLOCK,
    BertMapping,
    BertSizes,
    ConvertedBert,
    choose_heads,
    convert_layout,
)
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.tden.config import TDENConfig

# Modules of the authors' code that some checkpoints lack -> their names here
_OPTIONAL = {
    "decoder.u_layers": "cross_encoder",
    "decoder.g_layers": "cross_decoder",
    "predictor": "word_head",
    "v_predictor": "object_head",
    "similarity_predictor": "text_pooler, image_poolers",
}
# Which of the optional modules each kind of checkpoint has; `fusion` stands for `_FUSION`.
_KINDS = {
    "pretraining": frozenset(_OPTIONAL),
    "captioning": frozenset({"decoder.g_layers", "predictor"}),
    "retrieval": frozenset({"similarity_predictor"}),
    "vqa": frozenset({"decoder.u_layers", "decoder.g_layers", "fusion"}),
    "vqa without a decoder": frozenset({"decoder.u_layers", "fusion"}),
    "vcr": frozenset({"decoder.u_layers", "fusion"}),
}
_NOTES = (
    "Pretrained further, it corrupts and matches as in the paper: the file stores no mask_scheme,",
    "zero_overlapping_regions or ism_negatives. The authors' code has mask_scheme: bert,",
    "zero_overlapping_regions: true and ism_negatives: hardest. Its LayerDrop and the dropout of its poolers have no",
    "counterpart here.",
)
# In VQA and VCR `predictor` is not a language model's head but the holistic feature and its classifiers.
_FUSION = tuple(f"predictor.{part}." for part in ("u_pooler", "v_pooler", "g_pooler", "u_logits", "g_logits"))
# Our module -> theirs, in a block of the cross-encoder; queries, keys and values are mapped apart.
_CROSS_BLOCK = {
    "attention.out": "biattention.output.dense",
    "attention_end.norm": "biattention.output.LayerNorm",
    "image_ffn.0": "v_intermediate.dense",
    "image_ffn.2": "v_output.dense",
    "image_end.norm": "v_output.LayerNorm",
    "text_ffn.0": "t_intermediate.dense",
    "text_ffn.2": "t_output.dense",
    "text_end.norm": "t_output.LayerNorm",
}
_DECODER_BLOCK = {
    "attention.out": "self_attn.output.dense",
    "attention_end.norm": "self_attn.output.LayerNorm",
    "cross.out": "x_att.output.dense",
    "cross_end.norm": "x_att.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}
# The config of the authors' code, as far as it is the same in all checkpoints
_CONFIG: dict[str, Any] = {
    "layer_norm_eps": 1e-12,
    "embedding_norm_eps": 1e-5,
    "separate_region_norms": False,
    "tie_lm_head": False,
    "separate_ffn": True,
    "decoder_visual_source": "cross_encoder",
    "ism_pooling": "all_layers",
    "pooler_batch_norm": False,
    "use_decoder_in_fusion": True,
    "understanding_decoder_mask": "bidirectional",
    "fusion_pooling": "all_layers",
    "fusion": "product",
    "fusion_decoder": "apart",
    "fusion_norm_eps": 1e-5,
}


class _Mapping(BertMapping):
    """Maps TDEN's attention poolers as well."""

    def pooler(self, name: str, authors_name: str, size: int, batch_norm: bool) -> None:
        self.linear(f"{name}.score.0", f"{authors_name}.att.0", self.hidden, self.hidden)
        self.linear(f"{name}.score.3", f"{authors_name}.att.3", 1, self.hidden)
        self.linear(f"{name}.project", f"{authors_name}.embed", size, self.hidden)
        if batch_norm:
            self.batch_norm(f"{name}.norm", f"{authors_name}.bn", size)


def read_xmodaler(file: Path, request: ImportRequest) -> ImportedModel:
    """Read a checkpoint of the authors' code."""
    return convert_xmodaler(read_state_dict(file), heads=request.heads, task=request.task)


def convert_xmodaler(state: Mapping[str, Tensor], *, heads: int = 0, task: str = "") -> ImportedModel:
    """Convert a checkpoint of the authors' code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; the file does not store it.
        task: vqa or vcr, if a single-row classifier next to a decoder leaves both possible.

    Raises:
        CheckpointError: another layout (lists what is missing, unexpected or misshapen); the two biases of the LM head
            differ; `task` is needed, or is not what the weights are for.
    """
    kind = _find_kind(state, task)
    present = _KINDS[kind]
    mapping = _Mapping(state, 0, 0)
    size = mapping.size
    hidden = size("token_embed.embeddings.weight", 1)
    # Name of a stack -> its number of layers; at least 1, so that a missing layer is reported by its name.
    layers = {
        authors_name: max(1, len(mapping.numbers(rf"{re.escape(authors_name)}\.(\d+)\.")))
        for authors_name in ("encoder.layers", "encoder.v_layers", *present)
    }
    config: dict[str, Any] = {
        "vocab_size": size("token_embed.embeddings.weight", 0),
        "feature_dim": size("visual_embed.embeddings.weight", 1),
        "hidden": hidden,
        "heads": choose_heads(heads, hidden),
        "intermediate": size("encoder.layers.0.intermediate.dense.weight", 0),
        "object_layers": layers["encoder.v_layers"],
        "sentence_layers": layers["encoder.layers"],
        "max_positions": size("token_embed.embeddings_pos.position_embeddings.weight", 0),
        **_CONFIG,
    }
    # The config keeps its default number of layers for a stack that the checkpoint lacks.
    for field, authors_name in (("encoder_layers", "decoder.u_layers"), ("decoder_layers", "decoder.g_layers")):
        if authors_name in present:
            config[field] = layers[authors_name]
    mapping.hidden, mapping.intermediate = hidden, config["intermediate"]

    _map_embeddings(mapping, config)
    for name, authors_name, query, names in (
        ("sentence_encoder", "encoder.layers", "attention.self", ENCODER_BLOCK),
        ("object_encoder", "encoder.v_layers", "attention.self", ENCODER_BLOCK),
        ("cross_encoder", "decoder.u_layers", "biattention.self", _CROSS_BLOCK),
        ("cross_decoder", "decoder.g_layers", "self_attn.self", _DECODER_BLOCK),
    ):
        # The loop is empty for a stack that the checkpoint does not have.
        for i in range(layers.get(authors_name, 0)):
            mapping.attention(f"{name}.{i}.attention", f"{authors_name}.{i}.{query}")
            if name == "cross_decoder":
                # A decoder block attends twice: to its own words, then to the cross-encoder's output.
                mapping.attention(f"{name}.{i}.cross", f"{authors_name}.{i}.x_att.self")
            mapping.block(f"{name}.{i}", f"{authors_name}.{i}", names)
    config |= _map_heads(mapping, present, config)
    head: dict[str, Tensor] = {}
    if "fusion" in present:
        pooled = size("predictor.u_pooler.embed.weight", 0)
        config |= {"fusion_dim": pooled, "use_decoder_in_fusion": kind == "vqa", "segment_types": kind == "vcr"}
        head = _map_fusion(mapping, layers["decoder.u_layers"], pooled, decoder=kind == "vqa")
    mapping.check(f"a {kind} checkpoint of the authors' TDEN code")
    name = kind.partition(" ")[0]
    return ImportedModel(
        family="tden",
        origin=f"TDEN's {name}",
        config=config,
        weights=mapping.weights,
        task=None if name == "pretraining" else name,
        head=head,
        notes=_NOTES,
    )


def _map_embeddings(mapping: _Mapping, config: Mapping[str, Any]) -> None:
    hidden, take = mapping.hidden, mapping.take
    positions = "token_embed.embeddings_pos.position_embeddings.weight"
    mapping.weights |= {
        "text_embedding.words.weight": take("token_embed.embeddings.weight", config["vocab_size"], hidden),
        "text_embedding.positions.weight": take(positions, config["max_positions"], hidden),
        # (3, D) -> (2, D): no task uses the third type; `clone` so that the tensor holds these rows only.
        "text_embedding.types.weight": take("token_embed.embeddings_token_type.weight", 3, hidden)[:2].clone(),
    }
    mapping.norm("text_embedding.norm", "token_embed.embeddings_norm", hidden)
    mapping.linear("region_embedding.features", "visual_embed.embeddings", hidden, config["feature_dim"])
    # Five numbers locate a region.
    mapping.linear("region_embedding.locations", "visual_embed.embeddings_pos", hidden, 5)
    mapping.norm("region_embedding.norm", "visual_embed.embeddings_norm", hidden)


def _map_heads(mapping: _Mapping, present: frozenset[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Map the objectives' heads that are present; return the config keys that follow from them."""
    hidden, vocab, take, weights = mapping.hidden, config["vocab_size"], mapping.take, mapping.weights
    keys: dict[str, Any] = {}
    if "predictor" in present:
        mapping.linear("word_head.dense", "predictor.transform.dense", hidden, hidden)
        mapping.norm("word_head.norm", "predictor.transform.LayerNorm", hidden)
        weights["word_head.weight"] = take("predictor.decoder.weight", vocab, hidden)
        bias = weights["word_head.bias"] = take("predictor.bias", vocab)
        second = take("predictor.decoder.bias", vocab)
        # A shape that differs is reported by `check`, so only equal shapes are compared.
        if second.shape == bias.shape and not torch.equal(second, bias):
            raise CheckpointError("predictor.decoder.bias and predictor.bias differ; in this layout they are the same")
    if "v_predictor" in present:
        classes = keys["num_classes"] = mapping.size("v_predictor.decoder.weight", 0)
        mapping.linear("object_head.dense", "v_predictor.transform.dense", hidden, hidden)
        mapping.norm("object_head.norm", "v_predictor.transform.LayerNorm", hidden)
        weights["object_head.weight"] = take("v_predictor.decoder.weight", classes, hidden)
        weights["object_head.bias"] = take("v_predictor.decoder.bias", classes)
    if "similarity_predictor" in present:
        pooled = mapping.size("similarity_predictor.t_pooler.embed.weight", 0)
        norm = mapping.has("similarity_predictor.t_pooler.bn.")
        keys |= {"similarity_dim": pooled, "pooler_batch_norm": norm}
        mapping.pooler("text_pooler", "similarity_predictor.t_pooler", pooled, norm)
        for i in range(config["object_layers"]):
            mapping.pooler(f"image_poolers.{i}", f"similarity_predictor.v_pooler.{i}", pooled, norm)
    return keys


def _map_fusion(mapping: _Mapping, layers: int, pooled: int, *, decoder: bool) -> dict[str, Tensor]:
    """Map the poolers of the holistic feature; return its classifier, or with a decoder both classifiers."""
    outputs = mapping.size("predictor.u_logits.1.weight", 0)
    mapping.pooler("fusion_poolers.text", "predictor.u_pooler", pooled, batch_norm=False)
    for i in range(layers):
        # The last layer's pooler is `image`; the earlier ones are numbered.
        name = "image" if i == layers - 1 else f"image_{i}"
        mapping.pooler(f"fusion_poolers.{name}", f"predictor.v_pooler.{i}", pooled, batch_norm=False)
    mapping.norm("fusion_norm", "predictor.u_logits.0", pooled)
    mapping.linear("head.fused", "predictor.u_logits.1", outputs, pooled)
    if decoder:
        mapping.pooler("fusion_poolers.decoder", "predictor.g_pooler", pooled, batch_norm=False)
        mapping.norm("fusion_decoder_norm", "predictor.g_logits.0", pooled)
        mapping.linear("head.decoder", "predictor.g_logits.1", outputs, pooled)
    head = mapping.pop_head()
    # Without a decoder there is one classifier, which is a plain layer rather than a named one.
    return head if decoder else {name.removeprefix("fused."): tensor for name, tensor in head.items()}


def _find_kind(state: Mapping[str, Tensor], task: str) -> str:
    """Return which of `_KINDS` a state dict is."""
    other_names = [name for name in state if not name.startswith(_FUSION)]
    present = {module for module in _OPTIONAL if any(name.startswith(f"{module}.") for name in other_names)}
    if len(other_names) == len(state):
        # The nearest kind: `check` lists the difference as missing or unexpected names.
        kinds = [kind for kind in _KINDS if "fusion" not in _KINDS[kind]]
        # `^` is the symmetric difference: modules that only one of the two has.
        kind = min(kinds, key=lambda candidate: len(_KINDS[candidate] ^ present))
    else:
        classifier, decoder = state.get("predictor.u_logits.1.weight"), "decoder.g_layers" in present
        # A tensor without dimensions is damaged: `check` reports its shape.
        rows = len(classifier) if classifier is not None and classifier.dim() else 0
        if rows == 1 and decoder and not task:
            raise CheckpointError(
                "a classifier of one row next to a decoder: VQA with a single answer, or VCR with the layers for "
                "generation; pass --task vqa or --task vcr"
            )
        # VQA has several answers, VCR scores one choice; one row with a decoder may be either.
        kind = task if rows == 1 and decoder else "vcr" if rows == 1 else "vqa"
        if kind == "vcr" and decoder:
            raise CheckpointError(
                "a VCR model with a decoder: VCR has one classifier here, on the fused feature. Remove the weights of "
                "decoder.g_layers, predictor.g_pooler and predictor.g_logits if their scores were not added up"
            )
        kind = "vqa without a decoder" if kind == "vqa" and not decoder else kind
    name = kind.partition(" ")[0]
    if task and task != name:
        raise CheckpointError(f"the weights are of a {name} model, not of a {task} model as --task claims")
    return kind


# ---- BERT ------------------------------------------------------------------------------------------------------------


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: TDENConfig) -> ConvertedBert:
    """Convert a BERT for the text side of a TDEN of its sizes: text embedding, sentence encoder, LM head.

    If the file has no LM head (a plain BertModel), TDEN's keeps its initialization. A whole BERT that was trained to
    embed sentences by the mean of its states also sets ISM's text pooler, to that mean.

    bert: its config.json, with the pooling of sentence-transformers.
    """
    sizes = BertSizes.of(
        config,
        layers_key="sentence_layers",
        stack="sentence_encoder",
        tied=config.tie_lm_head,
        eps=("layer_norm_eps", "embedding_norm_eps"),
    )
    converted = convert_layout(state, bert, sizes)
    embeds = bert.get("pooling_mode_mean_tokens") and config.sentence_layers == bert["num_hidden_layers"]
    if embeds and config.similarity_dim in (None, config.hidden):
        converted.weights.update(_mean_pooler(config.hidden))
    return converted


def _mean_pooler(hidden: int) -> dict[str, Tensor]:
    """Return the weights with which ISM's text pooler gives the mean of the states: equal scores, no projection."""
    return {
        "text_pooler.score.3.weight": torch.zeros(1, hidden),
        "text_pooler.score.3.bias": torch.zeros(1),
        "text_pooler.project.weight": torch.eye(hidden),
        "text_pooler.project.bias": torch.zeros(hidden),
    }
