"""Unified VLP on the toy dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from toy_dataset import CLASSES, FEATURE_DIM, Toy

from vlp_models.models import DataFacts, build_model

SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 2, "region_slots": 8, "init_std": 0.1}


class UnifiedToy(Toy):
    def model(self, seed: int = 1, **config: Any) -> nn.Module:
        torch.manual_seed(seed)
        facts = DataFacts(
            vocab_size=self.tokenizer.vocab_size,
            mask_id=self.tokenizer.mask_id,
            feature_dim=FEATURE_DIM,
            num_classes=len(CLASSES),
        )
        return build_model("unified_vlp", {**SIZES, **config}, facts)


def unified(toy: Toy) -> UnifiedToy:
    return UnifiedToy(toy.shards, toy.tokenizer)
