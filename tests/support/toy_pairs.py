"""Retrieval on the toy dataset by a model that only fuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from toy_dataset import Toy
from toy_tasks import make

from vlp_models.data.batch import Image, Text
from vlp_models.tasks.retrieval import Retrieval


class Fusing(nn.Module):
    """The toy's model with its embeddings locked away: it fuses each pair, and a layer scores the two."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.inputs = model.inputs
        self.score_head = nn.Linear(model.fused_dim, 1)

    def encode_image(self, image: Image) -> Any:
        return image

    def score(self, state: Any, text: Text, image_of_text_N: Tensor) -> Tensor:
        fused = self.inner.fuse(state.select(image_of_text_N), text).pooled_BP
        return self.score_head(fused).squeeze(-1)


def by_pairs(toy: Toy, kind: type[nn.Module] = Fusing, **options: Any) -> Retrieval:
    plain = make(toy, "retrieval")
    torch.manual_seed(2)
    made = type(plain)(kind(plain.model), toy.tokenizer, replace(plain.info, options=options))
    assert isinstance(made, Retrieval)
    return made
