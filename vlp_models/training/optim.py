"""AdamW with warm-up and decay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vlp_models.params import OptimizerParams


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases, normalisation and other vectors don't, as BERT has it."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, params: OptimizerParams) -> torch.optim.AdamW:
    """Fused where torch has it for the device the parameters lie on: about a tenth of a small model's step."""
    kinds = {parameter.device.type for parameter in module.parameters()}
    return torch.optim.AdamW(
        parameter_groups(module, params.weight_decay),
        lr=params.lr,
        betas=(params.betas[0], params.betas[1]),
        eps=params.eps,
        fused=kinds <= {"cpu", "cuda"},
    )


def learning_rate_factor(step: int, *, total: int, params: OptimizerParams) -> float:
    """What `lr` is multiplied with at update `step` (from 0) of `total`.

    Rises linearly over the first `warmup_fraction` of the updates, then falls to zero (linear, cosine) or stays.
    The first update already moves, and the last one still does.
    """
    warmup = round(params.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if params.schedule == "constant":
        return 1.0
    left = max(0.0, (total - step) / max(1, total - warmup))
    return left if params.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def build_scheduler(
    optimizer: torch.optim.Optimizer, total: int, params: OptimizerParams
) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total=total, params=params)
    )
