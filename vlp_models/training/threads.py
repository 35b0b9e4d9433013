"""How many threads a training has on CPUs."""

from __future__ import annotations

import torch
from torch import nn

from vlp_models.data.inputs import ModelInputs, PixelInput
from vlp_models.params import TrainerParams

SMALL = 4_000_000  # parameters of a model whose steps are many short operations, if it reads no pixels


def set_threads(model: nn.Module, trainer: TrainerParams) -> None:
    """`trainer.torch_threads`. 0: one for a small model, whose operations are too short to gain much by sharing them
    (docs/log.md has figures); else as many as torch likes. So a small model has the same weights whoever trains beside
    it."""
    if trainer.torch_threads:
        torch.set_num_threads(trainer.torch_threads)
    elif _is_small(model):
        torch.set_num_threads(1)


def _is_small(model: nn.Module) -> bool:
    said = (getattr(module, "inputs", None) for module in model.modules())
    inputs = [of for of in said if isinstance(of, ModelInputs)]
    without_pixels = bool(inputs) and not any(isinstance(of.image, PixelInput) for of in inputs)
    return without_pixels and sum(p.numel() for p in model.parameters()) < SMALL
