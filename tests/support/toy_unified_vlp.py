"""Unified VLP on the toy dataset, and its losses as cases of two processes (tests/training/rank_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tiny_tden as tiny
import torch
from tiny_unified_vlp import tiny_unified_vlp
from torch import nn
from toy_dataset import CLASSES, FEATURE_DIM, Toy
from two_pass_toys import generator, recipe_of

from vlp_models.models import DataFacts, build_model
from vlp_models.params import ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss

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


def rank_cases(case: Callable[..., Any], rows: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Each objective alone, both summed, both drawn, with regions as pretext, in two passes."""

    def made(objectives: list[str], size: int, mix: str, scheme: str, **config: Any) -> Any:
        batch = replace(tiny.random_batch(size), image_ids=tuple("abbcdae"[:size]))
        recipe = recipe_of(dict.fromkeys(objectives, 1.0), mask_probability=0.4, mix=mix)
        model = tiny_unified_vlp(**config)
        loss = make_loss(model, recipe, ScheduledSamplingParams(scheme=scheme), name="u")  # type: ignore[arg-type]
        return case(model, lambda b: loss(b, update=0, generator=generator(3)), lambda i, j: rows(batch, i, j), size)

    both = ["bidirectional", "seq2seq"]
    every = {name: ([name], 7, "sum", "none", {}) for name in both}
    every["both"] = (both, 7, "sum", "none", {"mask_scheme": "mask"})
    every["drawn"] = (both, 7, "sample", "none", {})
    every["drawn_single"] = (both, 1, "sample", "none", {})
    every["pretext"] = ([*both, "moc"], 7, "sample", "none", {"region_classes": "pretext"})
    every |= {f"two_pass_{scheme}": (both, 7, "sum", scheme, {}) for scheme in "abc"}
    return {
        f"unified_vlp_{name}": lambda a=arguments: made(*a[:4], **a[4])  # type: ignore[misc]
        for name, arguments in every.items()
    }
