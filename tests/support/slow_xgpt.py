"""XGPT in NumPy, a sample at a time and a formula a line: what the model is measured against.

All arrays are float64. `w` is the model's state dict. Only what tests/models/test_xgpt.py needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def heads_attend(q: Array, k: Array, v: Array, heads: int, attends: Array | None = None) -> Array:
    """q [Q, D], k and v [K, D]; attends bool [Q, K]. A query and a head at a time."""
    out, width = np.zeros_like(q), q.shape[1] // heads
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        for i in range(len(q)):
            scores = k[:, part] @ q[i, part] / math.sqrt(width)
            if attends is not None:
                scores = np.where(attends[i], scores, -np.inf)
            out[i, part] = softmax(scores) @ v[:, part]
    return out


def projections(w: Weights, name: str) -> list[tuple[Array, Array]]:
    return list(zip(np.split(w[f"{name}.qkv.weight"], 3), np.split(w[f"{name}.qkv.bias"], 3), strict=True))


def attention(
    x: Array, context: Array, w: Weights, name: str, heads: int, attends: Array | None = None, more: Array | None = None
) -> Array:
    """x attends to `context`, or to `more` and it in one softmax."""
    (wq, bq), (wk, bk), (wv, bv) = projections(w, name)
    context = context if more is None else np.concatenate([more, context])
    found = heads_attend(x @ wq.T + bq, context @ wk.T + bk, context @ wv.T + bv, heads, attends)
    return linear(found, w, f"{name}.out")


class SlowXGPT:
    def __init__(self, w: Weights, config: Any) -> None:
        self.w, self.c = w, config

    def regions(self, features: Array, boxes: Array) -> tuple[Array, Array]:
        """Section 3 and appendix A.1: x^I and what the refiner makes of it."""
        w, c = self.w, self.c
        area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))[:, None]
        side_by_side = np.concatenate([features, boxes, area], 1)
        matrix = np.concatenate([w["region_embedding.features.weight"], w["region_embedding.locations.weight"]], 1)
        x = side_by_side @ matrix.T + w["region_embedding.features.bias"]
        embedded = x = norm(x, w, "region_embedding.norm", c.embedding_norm_eps)
        for i in range(c.refiner_layers):
            name = f"refiner.{i}"
            (wq, bq), (wk, bk), (wv, bv) = projections(w, name)
            query, key, value = x @ wq.T + bq, x @ wk.T + bk, x @ wv.T + bv
            f = heads_attend(query, key, value, c.heads)
            h = c.hidden
            gate, bias = w[f"{name}.gate.weight"], w[f"{name}.gate.bias"]
            w4, w3, w2, w1 = gate[:h, :h], gate[:h, h:], gate[h:, :h], gate[h:, h:]
            b2, b1 = bias[:h], bias[h:]
            sigmoid = 1 / (1 + np.exp(-(query @ w1.T + f @ w2.T + b1)))
            aoa = sigmoid * (query @ w3.T + f @ w4.T + b2)
            x = norm(x + aoa, w, f"{name}.norm", c.layer_norm_eps)
        return embedded, x

    def words(self, ids: list[int], positions: list[int] | None = None) -> Array:
        return self.place(self.w["text_embedding.words.weight"][ids], positions)

    def place(self, content: Array, positions: list[int] | None = None) -> Array:
        at = self.w["text_embedding.positions.weight"][positions if positions is not None else range(len(content))]
        return norm(content + at, self.w, "text_embedding.norm", self.c.embedding_norm_eps)

    def matched(self, words: Array, regions: Array, first_third: Array) -> Array:
        """A_ij = W [x_i, x_j, x_i o x_j], to the letter, with any first third of W."""
        whole = np.concatenate([first_third, *self.w["matching.weight"]])
        found = []
        for x in words:
            scores = np.array([whole @ np.concatenate([x, y, x * y]) for y in regions])
            found.append(sum(share * y for share, y in zip(softmax(scores), regions, strict=True)))
        return np.stack(found)

    def encode(self, x: Array) -> list[Array]:
        """The states before, between and after the layers."""
        states = [x]
        for i in range(self.c.layers):
            y = attention(x, x, self.w, f"layers.{i}.attention", self.c.heads)
            x = norm(x + y, self.w, f"layers.{i}.attention_end.norm", self.c.layer_norm_eps)
            x = self.feed(x, f"layers.{i}")
            states.append(x)
        return states

    def feed(self, x: Array, layer: str) -> Array:
        y = linear(gelu(linear(x, self.w, f"{layer}.ffn.0")), self.w, f"{layer}.ffn.2")
        return norm(x + y, self.w, f"{layer}.ffn_end.norm", self.c.layer_norm_eps)

    def decode(self, x: Array, states: list[Array]) -> Array:
        w, c, n = self.w, self.c, len(x)
        stack = "decoder" if c.structure == "enc_dec" else "layers"
        past = np.tril(np.ones((n, n), dtype=bool))
        for i in range(c.layers):
            layer = f"{stack}.{i}"
            encoded = states[i] if c.structure == "enc" else states[-1]
            signal = w.get(f"{layer}.signal", np.zeros((2, c.hidden)))
            on = {name: signal if c.signal == name else 0 * signal for name in ("kv", "query")}
            end = f"{layer}.attention_end.norm"
            if c.attends == "shared_merged":
                attends = np.concatenate([np.ones((n, len(encoded)), dtype=bool), past], 1)
                y = attention(x, x + on["kv"][0], w, f"{layer}.attention", c.heads, attends, more=encoded + on["kv"][1])
                x = norm(x + y, w, end, c.layer_norm_eps)
            else:
                y = attention(x + on["query"][0], x + on["kv"][0], w, f"{layer}.attention", c.heads, past)
                x = norm(x + y, w, end, c.layer_norm_eps)
                cross = f"{layer}.cross" if c.attends == "separate" else f"{layer}.attention"
                y = attention(x + on["query"][1], encoded + on["kv"][1], w, cross, c.heads)
                x = norm(x + y, w, f"{layer}.cross_end.norm" if c.cross_norm == "own" else end, c.layer_norm_eps)
            x = self.feed(x, layer)
        return x

    def logits(self, x: Array) -> Array:
        return x @ self.w["text_embedding.words.weight"].T + self.w["word_bias"]

    def ic(self, ids: list[int], features: Array, boxes: Array) -> Array:
        return self.logits(self.decode(self.words(ids), self.encode(self.regions(features, boxes)[1])))

    def imlm(self, ids: list[int], read: list[int], start: int, end: int, features: Array, boxes: Array) -> Array:
        """Logits of the words at start .. end - 1; the encoder reads `read`."""
        both = np.concatenate([self.words(read), self.regions(features, boxes)[1]])
        fragment = self.words([ids[0], *ids[start : end - 1]], list(range(start - 1, end - 1)))
        return self.logits(self.decode(fragment, self.encode(both)))

    def ida(self, ids: list[int], read: list[int], features: Array, boxes: Array, first_third: Array) -> Array:
        regions = self.regions(features, boxes)[1]
        found = self.place(self.matched(self.words(read), regions, first_third))
        return self.logits(self.decode(self.words(ids), self.encode(np.concatenate([found, regions]))))

    def tifg(self, ids: list[int], features: Array, boxes: Array) -> float:
        """The mean over features, summed over regions."""
        target = self.regions(features, boxes)[0]
        before = np.concatenate([self.w["first_region"], target[:-1]])
        generated = linear(self.decode(before, self.encode(self.words(ids))), self.w, "region_head")
        return float(((generated - target) ** 2).mean(1).sum())
