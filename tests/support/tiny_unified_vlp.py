"""A Unified VLP of a few thousand weights, in float64 and without dropout, and the paper's formulas in NumPy: one
sample at a time, every token computed, one head after the other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlp_models.data.batch import Batch, Regions, ScoredRegions
from vlp_models.models import DataFacts, build_model
from vlp_models.models.unified_vlp.model import UnifiedVLP

Array = NDArray[np.float64]
CLS, SEP, MASK, VOCAB = 2, 3, 4, 30
FACTS = DataFacts(vocab_size=VOCAB, mask_id=MASK, feature_dim=6, num_classes=5)
SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 2, "dropout": 0.0}
SIZES |= {"attention_dropout": 0.0, "region_slots": 7, "max_positions": 32, "init_std": 0.3}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "public code": {"compat_reference": True},
    "pretext": {"region_classes": "pretext"},
    "no classes": {"region_classes": "none"},
}


def tiny_unified_vlp(seed: int = 0, **overrides: Any) -> UnifiedVLP:
    """Build the model; norms and biases are distinct as well."""
    torch.manual_seed(seed)
    model = build_model("unified_vlp", {**SIZES, **overrides}, FACTS)
    assert isinstance(model, UnifiedVLP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.1)
    return model.double().eval()


def scored(batch: Batch) -> Batch:
    """The batch with what `compat_reference` reads."""
    assert isinstance(batch.image, Regions)
    generator = torch.Generator().manual_seed(8)
    scores = torch.rand(batch.image.mask_BR.shape, generator=generator, dtype=torch.float64)
    image = ScoredRegions(**vars(batch.image), scores_BR=scores * batch.image.mask_BR)
    return dataclasses.replace(batch, image=image)


class Slow:
    """The paper's model, of the weights of `model`."""

    def __init__(self, model: UnifiedVLP) -> None:
        self.config = model.config
        self.w = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        return plain_norm(x, self.config.layer_norm_eps) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def region(self, image: Any, sample: int, region: int) -> Array:
        """Equation 1, or what the public code does instead."""
        feature = image.features_BRF[sample, region].numpy()
        box, classes = image.boxes_BR4[sample, region].numpy(), image.class_probs_BRC[sample, region].numpy()
        looks = self.linear("region_embedding.features.2", relu(self.linear("region_embedding.features.0", feature)))
        if self.config.compat_reference:
            boxes = image.boxes_BR4[sample, : int(image.mask_BR[sample].sum())].numpy()
            width, height = boxes[:, [0, 2]].max(), boxes[:, [1, 3]].max()
            x1, y1, x2, y2 = box / [width, height, width, height]
            geometry = np.array([x1, y1, x2, y2, (x2 - x1) * (y2 - y1), image.scores_BR[sample, region].item()])
            known = np.concatenate([plain_norm(geometry, 1e-5), plain_norm(classes, 1e-5)])
        else:
            x1, y1, x2, y2 = box
            geometry = 2 * np.array([x1, y1, x2, y2, (x2 - x1) * (y2 - y1)]) - 1
            part = "region_embedding.of_geometry"
            known = self.norm(f"{part}.1", self.linear(f"{part}.0", geometry))
            if self.config.region_classes == "input":
                part = "region_embedding.of_classes"
                known = np.concatenate([self.norm(f"{part}.1", self.linear(f"{part}.0", classes)), known])
        return relu(looks) + relu(self.linear("region_embedding.places", known))

    def states(self, image: Any, sample: int, words: list[int], seq2seq: bool) -> Array:
        """[CLS], the regions, [SEP], the words: their last states. [U, D]"""
        t, first = "text_embedding", 2 * seq2seq
        regions = int(image.mask_BR[sample].sum())
        sep = self.config.region_slots + 1
        rows = [
            self.w[f"{t}.words.weight"][CLS] + self.w[f"{t}.positions.weight"][0] + self.w[f"{t}.types.weight"][first]
        ]
        for region in range(regions):
            rows.append(self.region(image, sample, region) + self.w[f"{t}.types.weight"][first])
        for i, word in enumerate([SEP, *words]):
            place = self.w[f"{t}.positions.weight"][sep + i]
            rows.append(self.w[f"{t}.words.weight"][word] + place + self.w[f"{t}.types.weight"][first + (i > 0)])
        x = self.norm(f"{t}.norm", np.stack(rows))
        mask, prefix = np.zeros((len(x), len(x))), regions + 2
        for j in range(len(x)):
            for k in range(len(x)):
                if seq2seq and k >= prefix and k > j:
                    mask[j, k] = -np.inf
        for layer in range(self.config.layers):
            x = self.block(f"stack.{layer}", x, mask)
        return x

    def block(self, name: str, x: Array, mask: Array) -> Array:
        query, key, value = np.split(self.linear(f"{name}.attention.qkv", x), 3, axis=-1)
        width, found = x.shape[1] // self.config.heads, []
        for head in range(self.config.heads):
            part = slice(head * width, (head + 1) * width)
            found.append(softmax(query[:, part] @ key[:, part].T / math.sqrt(width) + mask) @ value[:, part])
        x = self.norm(f"{name}.attention_end.norm", x + self.linear(f"{name}.attention.out", np.concatenate(found, 1)))
        y = self.linear(f"{name}.ffn.2", gelu(self.linear(f"{name}.ffn.0", x)))
        return self.norm(f"{name}.ffn_end.norm", x + y)

    def word_logits(self, state: Array) -> Array:
        x = self.norm("word_head.norm", gelu(self.linear("word_head.dense", state)))
        return x @ self.w["text_embedding.words.weight"].T + self.w["word_head.bias"]


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_norm(x: Array, eps: float) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
