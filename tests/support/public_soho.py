"""The public SOHO code's checkpoint layout, written from a model with the public code's switches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BERT = {
    "attention.out": "attention.output.dense",
    "attention_end.norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}


def bert_layout(state: dict[str, Tensor], prefix: str, layers: int) -> dict[str, Tensor]:
    """Return the weights of embeddings and encoder. prefix: of their names."""
    found = {
        f"{prefix}embeddings.{theirs}.weight": state[f"text_embedding.{ours}.weight"]
        for ours, theirs in (
            ("words", "word_embeddings"),
            ("positions", "position_embeddings"),
            ("types", "token_type_embeddings"),
        )
    }
    for part in ("weight", "bias"):
        found[f"{prefix}embeddings.LayerNorm.{part}"] = state[f"text_embedding.norm.{part}"]
        for i in range(layers):
            to = f"{prefix}encoder.layer.{i}"
            projections = state[f"transformer.{i}.attention.qkv.{part}"].chunk(3)
            for name, tensor in zip(("query", "key", "value"), projections, strict=True):
                found[f"{to}.attention.self.{name}.{part}"] = tensor.clone()
            for ours, theirs in BERT.items():
                found[f"{to}.{theirs}.{part}"] = state[f"transformer.{i}.{ours}.{part}"]
    return found


def public_layout(model: Any) -> dict[str, Tensor]:
    """Return a pretraining checkpoint; for a model with `fusion_hidden`, a VQA checkpoint with seven answers."""
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    found = {
        f"backbone.{name.removeprefix('backbone.net.')}": tensor
        for name, tensor in model.state_dict().items()
        if name.startswith("backbone.net.")
    }
    found["neck.conv.conv.weight"] = state["neck.conv.weight"]
    for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        found[f"neck.conv.bn.{part}"] = state[f"neck.norm.{part}"]
    found |= bert_layout(state, "language.bert.", model.config.layers)
    for part in ("weight", "bias"):
        found[f"neck.ln.{part}"] = state[f"visual_norm.{part}"]
    if model.config.fusion_hidden:
        for part in ("weight", "bias"):
            found[f"head.vqa.0.{part}"] = state[f"fusion.0.{part}"]
        found["head.vqa.3.weight"] = torch.randn(7, model.config.fusion_hidden)
        found["head.vqa.3.bias"] = torch.randn(7)
        return found
    for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        found[f"neck.gate_fc.bn.{part}"] = state[f"gate.norm.{part}"]
    found["neck.gate_fc.conv.weight"] = state["gate.scores.weight"][:, :, None, None]
    for part in ("weight", "bias"):
        found[f"neck.pos_line.{part}"] = state[f"gate.vectors.{part}"]
    found["neck.mask_emb.weight"] = state["hidden_cell"]
    found["neck.vq.embed"] = state["dictionary.codes"]
    found["neck.vq.cluster_size"] = state["dictionary.counts"]
    found["neck.vq.cluster_sum"] = torch.arange(float(model.config.dictionary_size))
    found["neck.vq.embed_avg"] = state["dictionary.sums"]
    found["head.match_class.weight"] = state["match_head.weight"]
    found["mask_l_fc.weight"] = state["text_embedding.words.weight"]
    return found
