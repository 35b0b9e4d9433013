"""The public code's checkpoints (YehLi/xmodaler) as TDEN's.

Such a checkpoint is one of pretraining, captioning, retrieval, VQA or VCR; its architecture is that code's
(`PublicSwitches`). VQA and VCR are told apart by their classifier: one row scores a choice of VCR, several are VQA's
answers. What this TDEN can't express:
- The third row of its token types, which no task uses: left out.
- Dropout after a feed-forward net's activation and in the poolers at a rate of their own, and LayerDrop: these matter
  in training alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.bert import ENCODER_BLOCK, Converter
from vlp_models.models.foreign import Asked, Imported, Taker, read_state_dict

# Modules of the public code that some checkpoints lack, and what they are here.
_OPTIONAL = {
    "decoder.u_layers": "cross_encoder",
    "decoder.g_layers": "cross_decoder",
    "predictor": "word_head",
    "v_predictor": "object_head",
    "similarity_predictor": "text_pooler, image_poolers",
}
_KINDS = {
    "pretraining": frozenset(_OPTIONAL),
    "captioning": frozenset({"decoder.g_layers", "predictor"}),
    "retrieval": frozenset({"similarity_predictor"}),
    "vqa": frozenset({"decoder.u_layers", "decoder.g_layers", "fusion"}),
    "vqa without a decoder": frozenset({"decoder.u_layers", "fusion"}),
    "vcr": frozenset({"decoder.u_layers", "fusion"}),
}
_NOTES = (
    "Pretrained further, it corrupts and matches as the paper does: mask_scheme, zero_overlapping_regions and",
    "ism_negatives are no weights, so the file does not tell them. The public code has mask_scheme: bert,",
    "zero_overlapping_regions: true and ism_negatives: hardest. Nor are its LayerDrop and its poolers' own dropout",
    "here.",
)
# In VQA and VCR, `predictor` is no language model's head but the holistic feature and its classifiers.
_FUSION = tuple(f"predictor.{part}." for part in ("u_pooler", "v_pooler", "g_pooler", "u_logits", "g_logits"))
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


class _Converter(Converter):
    """With what is TDEN's alone."""

    def pooler(self, ours: str, theirs: str, size: int, batch_norm: bool) -> None:
        self.linear(f"{ours}.score.0", f"{theirs}.att.0", self.hidden, self.hidden)
        self.linear(f"{ours}.score.3", f"{theirs}.att.3", 1, self.hidden)
        self.linear(f"{ours}.project", f"{theirs}.embed", size, self.hidden)
        if batch_norm:
            self.norm(f"{ours}.norm", f"{theirs}.bn", size)
            for part in ("running_mean", "running_var"):
                self.weights[f"{ours}.norm.{part}"] = self.taker.take(f"{theirs}.bn.{part}", size)
            seen = self.taker.take(f"{theirs}.bn.num_batches_tracked")
            self.weights[f"{ours}.norm.num_batches_tracked"] = seen.long()


def read_xmodaler(file: Path, asked: Asked) -> Imported:
    """A file of the public code (`models.foreign.Importer`).

    Raises:
        CheckpointError: see `convert_xmodaler`, `read_state_dict`.
    """
    return convert_xmodaler(read_state_dict(file), heads=asked.heads, task=asked.task)


def convert_xmodaler(state: Mapping[str, Tensor], *, heads: int = 0, task: str = "") -> Imported:
    """A checkpoint of the public code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; weights do not tell.
        task: vqa or vcr, where one row of a classifier beside a decoder's leaves both possible.

    Raises:
        CheckpointError: of another layout (lists what is missing, unexpected or misshapen), or a head's two biases
            differ that should be one, or `task` is needed, or not what the weights are.
    """
    kind = _kind(state, task)
    present = _KINDS[kind]
    taker = Taker(state)

    def size(name: str, dim: int) -> int:
        tensor = state.get(name)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else 0

    vocab, hidden = size("token_embed.embeddings.weight", 0), size("token_embed.embeddings.weight", 1)
    positions = size("token_embed.embeddings_pos.position_embeddings.weight", 0)
    intermediate = size("encoder.layers.0.intermediate.dense.weight", 0)
    features = size("visual_embed.embeddings.weight", 1)
    layers = {theirs: _layers(state, theirs) for theirs in ("encoder.layers", "encoder.v_layers", *present)}
    heads = heads or max(1, hidden // 64)
    if hidden % heads:
        raise CheckpointError(f"{heads} attention heads do not divide the hidden size {hidden}; give the right number")

    c = _Converter(taker, hidden, intermediate)
    words = taker.take("token_embed.embeddings.weight", vocab, hidden)
    types = taker.take("token_embed.embeddings_token_type.weight", 3, hidden)
    c.weights |= {
        "text_embedding.words.weight": words,
        "text_embedding.positions.weight": taker.take(
            "token_embed.embeddings_pos.position_embeddings.weight", positions, hidden
        ),
        "text_embedding.types.weight": types[:2].clone(),
    }
    c.norm("text_embedding.norm", "token_embed.embeddings_norm")
    c.linear("region_embedding.features", "visual_embed.embeddings", hidden, features)
    c.linear("region_embedding.locations", "visual_embed.embeddings_pos", hidden, 5)
    c.norm("region_embedding.norm", "visual_embed.embeddings_norm")
    for ours, theirs, query, names in (
        ("sentence_encoder", "encoder.layers", "attention.self", ENCODER_BLOCK),
        ("object_encoder", "encoder.v_layers", "attention.self", ENCODER_BLOCK),
        ("cross_encoder", "decoder.u_layers", "biattention.self", _CROSS_BLOCK),
        ("cross_decoder", "decoder.g_layers", "self_attn.self", _DECODER_BLOCK),
    ):
        for i in range(layers.get(theirs, 0)):
            c.attention(f"{ours}.{i}.attention", f"{theirs}.{i}.{query}")
            if ours == "cross_decoder":
                c.attention(f"{ours}.{i}.cross", f"{theirs}.{i}.x_att.self")
            c.block(f"{ours}.{i}", f"{theirs}.{i}", names)

    config: dict[str, Any] = {
        "vocab_size": vocab,
        "feature_dim": features,
        "hidden": hidden,
        "heads": heads,
        "intermediate": intermediate,
        "object_layers": layers["encoder.v_layers"],
        "sentence_layers": layers["encoder.layers"],
        "max_positions": positions,
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
    if "predictor" in present:
        c.linear("word_head.dense", "predictor.transform.dense", hidden, hidden)
        c.norm("word_head.norm", "predictor.transform.LayerNorm")
        c.weights["word_head.weight"] = taker.take("predictor.decoder.weight", vocab, hidden)
        c.weights["word_head.bias"] = taker.take("predictor.bias", vocab)
        again = taker.take("predictor.decoder.bias", vocab)
        if again.shape == c.weights["word_head.bias"].shape and not torch.equal(again, c.weights["word_head.bias"]):
            raise CheckpointError("predictor.decoder.bias and predictor.bias differ; in this layout they are one")
    if "v_predictor" in present:
        config["num_classes"] = size("v_predictor.decoder.weight", 0)
        c.linear("object_head.dense", "v_predictor.transform.dense", hidden, hidden)
        c.norm("object_head.norm", "v_predictor.transform.LayerNorm")
        c.weights["object_head.weight"] = taker.take("v_predictor.decoder.weight", config["num_classes"], hidden)
        c.weights["object_head.bias"] = taker.take("v_predictor.decoder.bias", config["num_classes"])
    if "similarity_predictor" in present:
        pooled = size("similarity_predictor.t_pooler.embed.weight", 0)
        norm = any(name.startswith("similarity_predictor.t_pooler.bn.") for name in state)
        config |= {"similarity_dim": pooled, "pooler_batch_norm": norm}
        c.pooler("text_pooler", "similarity_predictor.t_pooler", pooled, norm)
        for i in range(config["object_layers"]):
            c.pooler(f"image_poolers.{i}", f"similarity_predictor.v_pooler.{i}", pooled, norm)
    head: dict[str, Tensor] = {}
    if "fusion" in present:
        pooled, outputs = size("predictor.u_pooler.embed.weight", 0), size("predictor.u_logits.1.weight", 0)
        config |= {"fusion_dim": pooled, "use_decoder_in_fusion": kind == "vqa", "segment_types": kind == "vcr"}
        head = _fusion(c, layers["decoder.u_layers"], pooled, outputs, decoder=kind == "vqa")
    for field, theirs in (("encoder_layers", "decoder.u_layers"), ("decoder_layers", "decoder.g_layers")):
        if theirs in present:
            config[field] = layers[theirs]
    taker.check(f"a {kind} checkpoint of the public TDEN code")
    task = kind.partition(" ")[0]
    return Imported(
        family="tden",
        what=f"TDEN's {task}",
        config=config,
        weights=c.weights,
        task=None if task == "pretraining" else task,
        head=head,
        notes=_NOTES,
    )


def _fusion(c: _Converter, layers: int, pooled: int, outputs: int, *, decoder: bool) -> dict[str, Tensor]:
    """The holistic feature's weights, into `c`; returns its classifier's, with a decoder two of them."""
    c.pooler("fusion_poolers.text", "predictor.u_pooler", pooled, batch_norm=False)
    for i in range(layers):
        ours = "image" if i == layers - 1 else f"image_{i}"
        c.pooler(f"fusion_poolers.{ours}", f"predictor.v_pooler.{i}", pooled, batch_norm=False)
    c.norm("fusion_norm", "predictor.u_logits.0", pooled)
    c.linear("head.fused", "predictor.u_logits.1", outputs, pooled)
    if decoder:
        c.pooler("fusion_poolers.decoder", "predictor.g_pooler", pooled, batch_norm=False)
        c.norm("fusion_decoder_norm", "predictor.g_logits.0", pooled)
        c.linear("head.decoder", "predictor.g_logits.1", outputs, pooled)
    head = {name: c.weights.pop(name) for name in list(c.weights) if name.startswith("head.")}
    alone = "head." if decoder else "head.fused."
    return {name.removeprefix(alone): tensor for name, tensor in head.items()}


def _kind(state: Mapping[str, Tensor], task: str = "") -> str:
    others = [name for name in state if not name.startswith(_FUSION)]
    present = {module for module in _OPTIONAL if any(name.startswith(f"{module}.") for name in others)}
    if len(others) == len(state):
        # The nearest kind: what then differs is listed as missing or unexpected.
        kinds = [kind for kind in _KINDS if "fusion" not in _KINDS[kind]]
        return _checked(min(kinds, key=lambda kind: len(_KINDS[kind] ^ present)), task)
    classifier, decoder = state.get("predictor.u_logits.1.weight"), "decoder.g_layers" in present
    rows = len(classifier) if classifier is not None and classifier.dim() else 0
    if rows == 1 and decoder and not task:
        raise CheckpointError(
            "a classifier of one row beside a decoder: VQA with a single answer, or VCR with the layers for "
            "generation; say which with --task vqa or --task vcr"
        )
    found = task if rows == 1 and decoder else "vcr" if rows == 1 else "vqa"
    if found == "vcr" and decoder:
        raise CheckpointError(
            "a VCR model with a decoder: VCR has one classifier here, on the fused feature. Leave out the weights of "
            "decoder.g_layers, predictor.g_pooler and predictor.g_logits, if their scores were not added up"
        )
    return _checked("vqa without a decoder" if found == "vqa" and not decoder else found, task)


def _checked(kind: str, task: str) -> str:
    if task and task != kind.partition(" ")[0]:
        raise CheckpointError(f"the weights are a {kind.partition(' ')[0]} model's, not {task}'s, as --task says")
    return kind


def _layers(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many there are; a gap in their numbers shows as missing and unexpected names."""
    numbers = {match[1] for name in state if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))}
    return max(1, len(numbers))
