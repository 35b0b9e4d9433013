"""A plain VLMo on weights in the public layout: the reference of
tests/contrib/public_weights/test_vlmo_convert.py.

Softmax is explicit, each pass gathers all layers' biases from a single table, and texts stay padded to their full
length, masked. It imports nothing from vlp_models.

Shape suffixes: B pairs, T text tokens, I image tokens, N = T + I, D hidden, H heads, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TEXTS = 196  # maximum tokens of a text in the table of offsets

State = Mapping[str, Tensor]


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


class PlainVLMo:
    def __init__(self, state: State, *, heads: int, side: int) -> None:
        self.state, self.heads = state, heads
        self.patch = state["transformer.patch_embed.proj.weight"].shape[-1]
        self.grid = side // self.patch
        self.layers = 1 + max(int(n.split(".")[2]) for n in state if n.startswith("transformer.blocks."))

    def pair(self, pixels_B3SS: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, N, D]: the text's tokens, then the image's."""
        x = torch.cat([self.words(ids_BT), self.patches(pixels_B3SS)], 1)
        seen = torch.cat([mask_BT, mask_BT.new_ones(len(x), x.shape[1] - mask_BT.shape[1])], 1)
        return self.run(x, seen, "pair", mask_BT.shape[1])

    def text(self, ids_BT: Tensor, mask_BT: Tensor, way: str = "text", first: int | None = None) -> Tensor:
        return self.run(self.words(ids_BT), mask_BT, way, mask_BT.shape[1], first)

    def image(self, pixels_B3SS: Tensor, way: str = "imag", first: int | None = None) -> Tensor:
        x = self.patches(pixels_B3SS)
        return self.run(x, x.new_ones(x.shape[:2], dtype=torch.bool), way, 0, first)

    def embedded(self, states_BND: Tensor, name: str) -> Tensor:
        return F.normalize(states_BND[:, 0] @ self.state[f"itc_{name}_proj.fc.weight"].T, dim=-1)

    def pooled(self, states_BND: Tensor) -> Tensor:
        return self.linear(states_BND[:, 0], "pooler.dense").tanh()

    def patches(self, pixels_B3SS: Tensor) -> Tensor:
        at = "transformer.patch_embed.proj"
        x = F.conv2d(pixels_B3SS, self.state[f"{at}.weight"], self.state[f"{at}.bias"], stride=self.patch)
        x = torch.cat([self.state["transformer.cls_token"].expand(len(x), 1, -1), x.flatten(2).transpose(1, 2)], 1)
        if "transformer.pos_embed" in self.state:
            x = x + self.state["transformer.pos_embed"]
        return x + self.state["token_type_embeddings.weight"][1]

    def words(self, ids_BT: Tensor) -> Tensor:
        at = "text_embeddings"
        x = self.state[f"{at}.word_embeddings.weight"][ids_BT] + self.state[f"{at}.token_type_embeddings.weight"][0]
        if "transformer.pos_embed" in self.state:
            x = x + self.state[f"{at}.position_embeddings.weight"][: ids_BT.shape[1]]
        return self.norm(x, f"{at}.LayerNorm", 1e-12) + self.state["token_type_embeddings.weight"][0]

    def run(self, x: Tensor, seen_BN: Tensor, way: str, texts: int, first: int | None = None) -> Tensor:
        """way: text or imag, its expert everywhere; pair; text+vl or imag+vl: from layer `first` on the vl expert."""
        bias = self.biases(texts, x.shape[1] - texts)
        for layer in range(self.layers):
            at = f"transformer.blocks.{layer}"
            y = self.attend(self.norm(x, f"{at}.norm1", 1e-6), seen_BN, at, None if bias is None else bias[layer])
            x = x + y * self.state.get(f"{at}.gamma_1", 1.0)
            if way == "pair":
                fused = f"{at}.norm2_vl.weight" in self.state
                parts = [(x, "vl")] if fused else [(x[:, :texts], "text"), (x[:, texts:], "imag")]
            else:
                parts = [(x, "vl" if first is not None and layer >= first else way)]
            y = torch.cat([self.expert(part, at, name) for part, name in parts], 1)
            x = x + y * self.state.get(f"{at}.gamma_2", 1.0)
        return self.norm(x, "transformer.norm", 1e-6)

    def attend(self, x: Tensor, seen_BN: Tensor, at: str, bias_HNN: Tensor | None) -> Tensor:
        q_bias, v_bias = self.state[f"{at}.attn.q_bias"], self.state[f"{at}.attn.v_bias"]
        qkv = F.linear(x, self.state[f"{at}.attn.qkv.weight"], torch.cat([q_bias, torch.zeros_like(v_bias), v_bias]))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if bias_HNN is not None:
            scores = scores + bias_HNN
        weights = scores.masked_fill(~seen_BN[:, None, None, :], float("-inf")).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2), f"{at}.attn.proj")

    def expert(self, x: Tensor, at: str, name: str) -> Tensor:
        x = self.norm(x, f"{at}.norm2_{name}", 1e-6)
        return self.linear(F.gelu(self.linear(x, f"{at}.mlp_{name}.fc1")), f"{at}.mlp_{name}.fc2")

    def biases(self, texts: int, images: int) -> Any:
        """Gather the biases in each pass, [L, H, N, N]."""
        table = self.state.get("relative_position_bias_table")
        if table is None:
            return None
        index = self.index
        rows = [*range(texts), *range(TEXTS, TEXTS + images)]
        index = index[rows][:, rows]
        return table[index].permute(2, 0, 1).unflatten(0, (self.layers, self.heads)).contiguous()

    @cached_property
    def index(self) -> Tensor:
        """int64 [196 + I, 196 + I]: rows of the table, of a text's tokens and an image's."""
        g, span = self.grid, 2 * self.grid - 1
        images, rows = 1 + g * g, span * span + 3
        index = torch.empty(TEXTS + images, TEXTS + images, dtype=torch.int64)
        index[:TEXTS, TEXTS:], index[TEXTS:, :TEXTS] = rows, rows + 1
        words = torch.arange(TEXTS)
        index[:TEXTS, :TEXTS] = words[None] - words[:, None] + TEXTS - 2 + rows + 2
        last = rows + 2 + 2 * TEXTS
        index[0, :TEXTS], index[:TEXTS, 0], index[0, 0] = last - 3, last - 2, last - 1
        y, x = torch.arange(g * g) // g, torch.arange(g * g) % g
        offsets = (y[:, None] - y + g - 1) * span + x[:, None] - x + g - 1
        index[TEXTS + 1 :, TEXTS + 1 :] = offsets
        index[TEXTS, TEXTS:], index[TEXTS:, TEXTS], index[TEXTS, TEXTS] = rows - 3, rows - 2, rows - 1
        return index

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)
