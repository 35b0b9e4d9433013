"""The layout of the public TDEN code's checkpoints, written out by its documented names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.models.tden.model import TDEN

# The switches that make this TDEN the public code's.
PUBLIC: dict[str, Any] = {
    "tie_lm_head": False,
    "separate_ffn": True,
    "decoder_visual_source": "cross_encoder",
    "ism_pooling": "all_layers",
    "pooler_batch_norm": True,
    "similarity_dim": 12,
    "fusion": "product",
    "fusion_pooling": "all_layers",
    "understanding_decoder_mask": "bidirectional",
    "fusion_decoder": "apart",
    "fusion_norm_eps": 1e-5,
}


def public_layout(model: TDEN) -> dict[str, Tensor]:
    """`model`'s weights as the public code names them."""
    own, out = model.state_dict(), {}

    def pair(theirs: str, ours: str) -> None:
        for part in ("weight", "bias"):
            out[f"{theirs}.{part}"] = own[f"{ours}.{part}"]

    def attention(theirs: str, ours: str) -> None:
        for part in ("weight", "bias"):
            for name, tensor in zip(("query", "key", "value"), own[f"{ours}.qkv.{part}"].chunk(3), strict=True):
                out[f"{theirs}.self.{name}.{part}"] = tensor.clone()
        pair(f"{theirs}.output.dense", f"{ours}.out")
        pair(f"{theirs}.output.LayerNorm", f"{ours}_end.norm")

    def feed_forward(theirs: str, ours: str, kind_theirs: str = "", kind_ours: str = "") -> None:
        pair(f"{theirs}.{kind_theirs}intermediate.dense", f"{ours}.{kind_ours}ffn.0")
        pair(f"{theirs}.{kind_theirs}output.dense", f"{ours}.{kind_ours}ffn.2")
        end = f"{kind_ours}end" if kind_ours else "ffn_end"
        pair(f"{theirs}.{kind_theirs}output.LayerNorm", f"{ours}.{end}.norm")

    def pooler(theirs: str, ours: str) -> None:
        pair(f"{theirs}.att.0", f"{ours}.score.0")
        pair(f"{theirs}.att.3", f"{ours}.score.3")
        pair(f"{theirs}.embed", f"{ours}.project")
        pair(f"{theirs}.bn", f"{ours}.norm")
        for part in ("running_mean", "running_var", "num_batches_tracked"):
            out[f"{theirs}.bn.{part}"] = own[f"{ours}.norm.{part}"]

    out["token_embed.embeddings.weight"] = own["text_embedding.words.weight"]
    out["token_embed.embeddings_pos.position_embeddings.weight"] = own["text_embedding.positions.weight"]
    types = own["text_embedding.types.weight"]
    out["token_embed.embeddings_token_type.weight"] = torch.cat([types, types[:1]])
    pair("token_embed.embeddings_norm", "text_embedding.norm")
    pair("visual_embed.embeddings", "region_embedding.features")
    pair("visual_embed.embeddings_pos", "region_embedding.locations")
    pair("visual_embed.embeddings_norm", "region_embedding.norm")
    for theirs, ours in (("encoder.layers", "sentence_encoder"), ("encoder.v_layers", "object_encoder")):
        for i in range(len(getattr(model, ours))):
            attention(f"{theirs}.{i}.attention", f"{ours}.{i}.attention")
            feed_forward(f"{theirs}.{i}", f"{ours}.{i}")
    for i in range(len(model.cross_encoder)):
        attention(f"decoder.u_layers.{i}.biattention", f"cross_encoder.{i}.attention")
        feed_forward(f"decoder.u_layers.{i}", f"cross_encoder.{i}", "v_", "image_")
        feed_forward(f"decoder.u_layers.{i}", f"cross_encoder.{i}", "t_", "text_")
    for i in range(len(model.cross_decoder)):
        attention(f"decoder.g_layers.{i}.self_attn", f"cross_decoder.{i}.attention")
        attention(f"decoder.g_layers.{i}.x_att", f"cross_decoder.{i}.cross")
        feed_forward(f"decoder.g_layers.{i}", f"cross_decoder.{i}")
    for theirs, ours in (("predictor", "word_head"), ("v_predictor", "object_head")):
        pair(f"{theirs}.transform.dense", f"{ours}.dense")
        pair(f"{theirs}.transform.LayerNorm", f"{ours}.norm")
        pair(f"{theirs}.decoder", ours)
    out["predictor.bias"] = own["word_head.bias"]
    pooler("similarity_predictor.t_pooler", "text_pooler")
    for i in range(len(model.image_poolers)):
        pooler(f"similarity_predictor.v_pooler.{i}", f"image_poolers.{i}")
    return out


def public_task_layout(model: TDEN, head: nn.Module) -> dict[str, Tensor]:
    """A VQA or VCR model's weights as the public code names them; `head`: the task's."""
    vqa = isinstance(head, nn.ModuleDict)
    kept = ("token_embed.", "visual_embed.", "encoder.", "decoder.u_layers.", *(["decoder.g_layers."] if vqa else []))
    out = {name: tensor for name, tensor in public_layout(model).items() if name.startswith(kept)}
    own = model.state_dict()
    last = len(model.cross_encoder) - 1
    poolers = {"u_pooler": "text", **{f"v_pooler.{i}": f"image_{i}" for i in range(last)}, f"v_pooler.{last}": "image"}
    if vqa:
        poolers["g_pooler"] = "decoder"
    for theirs, ours in poolers.items():
        for there, here in (("att.0", "score.0"), ("att.3", "score.3"), ("embed", "project")):
            for part in ("weight", "bias"):
                out[f"predictor.{theirs}.{there}.{part}"] = own[f"fusion_poolers.{ours}.{here}.{part}"]
    classifiers = {"u": ("fusion_norm", head["fused"] if vqa else head)}
    if vqa:
        classifiers["g"] = ("fusion_decoder_norm", head["decoder"])
    for letter, (norm, linear) in classifiers.items():
        for part in ("weight", "bias"):
            out[f"predictor.{letter}_logits.0.{part}"] = own[f"{norm}.{part}"]
            out[f"predictor.{letter}_logits.1.{part}"] = linear.state_dict()[part]
    return out
