"""Random weights with the names and shapes of the public VLMo code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TEXTS = 196  # maximum tokens of a text in the table of offsets


def random_state(
    *,
    hidden: int,
    heads: int,
    layers: int,
    start: int,
    side: int,
    patch: int = 16,
    vocab: int = 30522,
    length: int = 40,
    kind: str = "pretraining",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random weights of the documented names and shapes. kind: pretraining, text (the second stage), retrieval, vqa,
    nlvr2, plus (absolute positions, no scales)."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    rows = (2 * side // patch - 1) ** 2 + 3 + 2 + 2 * TEXTS

    def add(name: str, *shape: int, scale: float = 0.0, around: float = 0.0) -> None:
        scale = scale or 1 / math.sqrt(shape[-1] if len(shape) > 1 else 25)
        state[name] = torch.randn(*shape, generator=generator) * scale + around

    def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        add(f"{name}.weight", outputs, inputs)
        if bias:
            add(f"{name}.bias", outputs)

    def norm(name: str, size: int = hidden) -> None:
        add(f"{name}.weight", size, around=1.0)
        add(f"{name}.bias", size)

    experts = 2 if kind == "text" else 3
    if kind == "plus":
        add("transformer.pos_embed", 1, 1 + (side // patch) ** 2, hidden)
    else:
        add("relative_position_bias_table", rows, heads * layers, scale=0.5)
    add("transformer.cls_token", 1, 1, hidden)
    add("transformer.patch_embed.proj.weight", hidden, 3, patch, patch, scale=1 / (patch * math.sqrt(3)))
    add("transformer.patch_embed.proj.bias", hidden)
    norm("transformer.norm")
    for layer in range(layers):
        block = f"transformer.blocks.{layer}"
        if kind != "plus":
            add(f"{block}.gamma_1", hidden, around=0.5)
            add(f"{block}.gamma_2", hidden, around=0.5)
        norm(f"{block}.norm1")
        add(f"{block}.attn.q_bias", hidden)
        add(f"{block}.attn.v_bias", hidden)
        linear(f"{block}.attn.qkv", 3 * hidden, hidden, bias=False)
        linear(f"{block}.attn.proj", hidden, hidden)
        for name in ("text", "imag", "vl")[: experts if layer >= start else 2]:
            norm(f"{block}.norm2_{name}")
            linear(f"{block}.mlp_{name}.fc1", 4 * hidden, hidden)
            linear(f"{block}.mlp_{name}.fc2", hidden, 4 * hidden)
    state["text_embeddings.position_ids"] = torch.arange(length)[None]
    add("text_embeddings.word_embeddings.weight", vocab, hidden)
    add("text_embeddings.position_embeddings.weight", length, hidden)
    add("text_embeddings.token_type_embeddings.weight", 2, hidden)
    norm("text_embeddings.LayerNorm")
    add("token_type_embeddings.weight", 3 if kind == "nlvr2" else 2, hidden)
    linear("pooler.dense", hidden, hidden)
    if kind in ("pretraining", "text", "plus"):
        linear("mlm_score.transform.dense", hidden, hidden)
        norm("mlm_score.transform.LayerNorm")
        linear("mlm_score.decoder", vocab, hidden, bias=False)
        add("mlm_score.bias", vocab)
    if kind in ("pretraining", "plus"):
        linear("itm_score.fc", 2, hidden)
    if kind in ("pretraining", "retrieval", "plus"):
        for name in ("", "vl_") if kind != "retrieval" else ("",):
            state[f"logit_{name}scale"] = torch.tensor(2.5)
            linear(f"itc_{name}text_proj.fc", hidden, hidden, bias=False)
            linear(f"itc_{name}image_proj.fc", hidden, hidden, bias=False)
    for name, inputs, outputs in (("vqa", hidden, 9), ("nlvr2", 2 * hidden, 2)):
        if kind == name:
            linear(f"{name}_classifier.0", 2 * hidden, inputs)
            norm(f"{name}_classifier.1", 2 * hidden)
            linear(f"{name}_classifier.3", outputs, 2 * hidden)
    return state
