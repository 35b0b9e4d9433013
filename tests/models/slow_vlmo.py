"""VLMo's encoders token by token in NumPy: no packing, no gathering, one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.models.vlmo.model import VLMo

Array = NDArray[np.float64]


class Slow:
    def __init__(self, model: VLMo) -> None:
        self.config = model.config
        self.weights = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}

    def image(self, pixels_3HW: Array) -> Array:
        return self.run(self.patches(pixels_3HW), [], "vision")

    def text(self, ids: list[int]) -> Array:
        return self.run([], self.words(ids), "language")

    def pair(self, pixels_3HW: Array, ids: list[int]) -> Array:
        return self.run(self.patches(pixels_3HW), self.words(ids), "pair")

    def patches(self, pixels_3HW: Array) -> list[Array]:
        w, p, g = self.weights, self.config.patch, self.config.grid
        tokens = [w["image_embedding.cls_1D"][0]]
        for y in range(g):
            for x in range(g):
                patch = pixels_3HW[:, y * p : (y + 1) * p, x * p : (x + 1) * p]
                kernel = w["image_embedding.patches.weight"]
                tokens.append((kernel * patch).sum((1, 2, 3)) + w["image_embedding.patches.bias"])
        tokens = [token + w["image_embedding.type_1D"][0] for token in tokens]
        if self.config.positions == "absolute":
            tokens = [token + place for token, place in zip(tokens, w["image_embedding.positions_SD"], strict=True)]
        return tokens

    def words(self, ids: list[int]) -> list[Array]:
        w, tokens = self.weights, []
        for position, word in enumerate(ids):
            token = w["text_embedding.words.weight"][word]
            if self.config.positions == "absolute":
                token = token + w["text_embedding.positions.weight"][position]
            tokens.append(self.norm(token, "text_embedding.norm", self.config.embedding_norm_eps))
        return [token + w["text_embedding.type_1D"][0] for token in tokens]

    def run(self, image: list[Array], text: list[Array], way: str) -> Array:
        """[tokens, D]; way: which expert."""
        c = self.config
        tokens = [*image, *text]
        kinds = ["vision"] * len(image) + ["language"] * len(text)
        for layer in range(c.layers):
            tokens = self.attend(tokens, layer, len(image))
            expert = ["vision_language"] * len(tokens) if way == "pair" and layer >= c.vl_start else kinds
            if c.feed_forward == "shared":
                expert = ["shared"] * len(tokens)
            tokens = [self.feed(token, layer, name) for token, name in zip(tokens, expert, strict=True)]
        return np.stack([self.norm(token, "norm", c.layer_norm_eps) for token in tokens])

    def attend(self, tokens: list[Array], layer: int, images: int) -> list[Array]:
        w, c, at = self.weights, self.config, f"blocks.{layer}."
        size = c.hidden // c.heads
        normed = [self.norm(token, at + "attention_norm", c.layer_norm_eps) for token in tokens]
        qkv = [w[at + "attention.qkv.weight"] @ x + w[at + "attention.qkv.bias"] for x in normed]
        found = []
        for i, token in enumerate(tokens):
            heads = []
            for h in range(c.heads):
                part = slice(h * size, (h + 1) * size)
                query = qkv[i][: c.hidden][part]
                scores = [
                    query @ qkv[j][c.hidden : 2 * c.hidden][part] / math.sqrt(size) + self.bias(layer, h, i, j, images)
                    for j in range(len(tokens))
                ]
                weights = np.exp(scores - np.max(scores))
                weights = weights / weights.sum()
                heads.append(sum(a * x[2 * c.hidden :][part] for a, x in zip(weights, qkv, strict=True)))
            y = w[at + "attention.out.weight"] @ np.concatenate(heads) + w[at + "attention.out.bias"]
            found.append(token + y * self.scale(at + "attention_scale"))
        return found

    def bias(self, layer: int, head: int, i: int, j: int, images: int) -> float:
        """Of query i and key j; tokens before `images` are an image's."""
        if self.config.positions == "absolute":
            return 0.0
        row = layer * self.config.heads + head
        image, cross, text = (self.weights[f"position_bias.{name}"][row] for name in ("image", "cross", "text"))
        if (i < images) != (j < images):
            return float(cross[1] if i < images else cross[0])
        table, start = (image, 0) if i < images else (text, images)
        a, b = i - start, j - start
        if a == 0 or b == 0:
            return float(table[-1] if a == b else table[-3] if a == 0 else table[-2])
        if table is text:
            return float(text[b - a + self.config.max_positions - 2])
        g = self.config.grid
        down, right = (a - 1) // g - (b - 1) // g, (a - 1) % g - (b - 1) % g
        return float(image[(down + g - 1) * (2 * g - 1) + right + g - 1])

    def feed(self, token: Array, layer: int, expert: str) -> Array:
        w, at = self.weights, f"blocks.{layer}.experts.{expert}."
        x = self.norm(token, at + "norm", self.config.layer_norm_eps)
        x = w[at + "ffn.0.weight"] @ x + w[at + "ffn.0.bias"]
        x = x * np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
        y = w[at + "ffn.2.weight"] @ x + w[at + "ffn.2.bias"]
        return token + y * self.scale(f"blocks.{layer}.expert_scale")

    def scale(self, name: str) -> Any:
        return self.weights.get(name, 1.0)

    def norm(self, x: Array, name: str, eps: float) -> Array:
        w = self.weights
        centered: Array = x - x.mean()
        return centered / np.sqrt((centered**2).mean() + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]
