"""For the tests of two-pass scheduled sampling: its loss with short defaults, and the tiny TDEN in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vlp_models.params import ObjectiveParams, RampParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss

ALL = {"mlm": 1.0, "moc": 1.0, "ism": 1.0, "msg": 1.0}


def recipe_of(weights: Mapping[str, float], **settings: Any) -> RecipeParams:
    """`settings`: of RecipeParams; `shares` of the objectives."""
    shares = settings.pop("shares", {})
    objectives = {name: ObjectiveParams(weight=weight, share=shares.get(name, 1.0)) for name, weight in weights.items()}
    return RecipeParams(objectives=objectives, **settings)


def two_pass(model: nn.Module, scheme: str, *, weights=None, sample="multinomial", ramp=None, probability=0.4) -> Any:
    return make_loss(
        model,
        recipe_of(weights or ALL, mask_probability=probability),
        ScheduledSamplingParams(scheme=scheme, sample=sample, ramp=ramp or RampParams()),  # type: ignore[arg-type]
        name="tden",
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
