"""AdamW, or Muon for the matrices of the blocks, with warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vlp_models.models.layers.blocks import BLOCKS
from vlp_models.params import OptimizerParams


class Joint(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one: one step, one schedule, one state."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([p for part in self.parts for group in part.param_groups for p in group["params"]], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """A schedule that sets the rate in `param_groups` must set the parts' own."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases, normalisation and other vectors don't, as BERT has it."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def block_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The weight matrices inside transformer blocks: neither embeddings, nor heads, nor poolers."""
    blocks = [m for m in module.modules() if isinstance(m, BLOCKS)]
    found = {id(p): p for block in blocks for p in block.parameters() if p.ndim == 2 and p.requires_grad}
    return list(found.values())


def build_optimizer(module: nn.Module, params: OptimizerParams) -> torch.optim.Optimizer:
    """AdamW; with `muon_lr`, Muon (Jordan et al. 2024) for the matrices of the blocks and AdamW for the rest.

    Muon makes the singular values of each update equal. On the synthetic data tiny models trained from nothing learned
    from fewer samples with it (docs/log.md, docs/log-nlvr.md). Its cost is per update, not per sample: about a tenth of
    a step of 64 at hidden size 128, more with smaller batches.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = block_matrices(module) if params.muon_lr else []
    taken = set(map(id, matrices))
    kinds = {parameter.device.type for parameter in trained}
    adamw = torch.optim.AdamW(
        parameter_groups([p for p in trained if id(p) not in taken], params.weight_decay),
        lr=params.lr,
        betas=(params.betas[0], params.betas[1]),
        eps=params.eps,
        fused=kinds <= {"cpu", "cuda"},  # about a tenth of a small model's step
    )
    if not matrices:
        return adamw
    muon = torch.optim.Muon(
        matrices, lr=params.muon_lr, weight_decay=params.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Joint([adamw, muon])


def learning_rate_factor(step: int, *, total: int, params: OptimizerParams) -> float:
    """What `lr` is multiplied with at update `step` (from 0) of `total`.

    Rises linearly over the first `warmup_fraction` of the updates, then falls to zero (linear, cosine), stays
    (constant), or is multiplied with `decay_by` after each share `decay_at` of all updates (steps).
    The first update already moves, and the last one still does.
    """
    warmup = round(params.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if params.schedule in ("constant", "steps"):
        return params.decay_by ** sum(step >= round(share * total) for share in params.decay_at)
    left = max(0.0, (total - step) / max(1, total - warmup))
    return left if params.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def build_scheduler(
    optimizer: torch.optim.Optimizer, total: int, params: OptimizerParams
) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total=total, params=params)
    )
