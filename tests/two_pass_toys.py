"""For the tests of two-pass scheduled sampling: its loss with short defaults, and the tiny TDEN in float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlp_models.params import RampParams
from vlp_models.training.recipe import make_recipe
from vlp_models.training.scheduled_sampling import make_two_pass_loss

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "models" / "conftest.py")
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

ALL = {"mlm": 1.0, "moc": 1.0, "ism": 1.0, "msg": 1.0}


def two_pass(model: nn.Module, scheme: str, *, weights=None, sample="multinomial", ramp=None, probability=0.4) -> Any:
    recipe = make_recipe("sum", weights or ALL, known=model.objectives, seed=0)
    return make_two_pass_loss(
        model,
        recipe,
        name="tden",
        mask_probability=probability,
        scheme=scheme,
        sample=sample,
        ramp=ramp or RampParams(),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
