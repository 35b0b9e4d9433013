"""AdamW, Adam, SGD and Muon, each for its parts of the model, with warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.errors import ParamsError
from vlp_models.models.layers.blocks import WITH_MATRICES
from vlp_models.params import GroupParams, OptimizerParams
from vlp_models.training.groups import chosen_groups
from vlp_models.training.muon import Muon


class CombinedOptimizer(torch.optim.Optimizer):
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


def block_matrices(module: nn.Module) -> list[Tensor]:
    """The weights of the linear layers inside transformer blocks: neither embeddings, nor heads, nor poolers."""
    blocks = [m for m in module.modules() if isinstance(m, WITH_MATRICES)]
    layers = dict.fromkeys(m for block in blocks for m in block.modules() if isinstance(m, nn.Linear))
    return [layer.weight for layer in layers if layer.weight.requires_grad]


def build_optimizer(module: nn.Module, params: OptimizerParams) -> torch.optim.Optimizer:
    """AdamW or Adam; with `muon_lr`, Muon (training/muon.py) for the matrices of the blocks; with `groups`, what these
    say for their parts.

    Muon makes the singular values of each update equal. On the synthetic data tiny models trained from nothing learned
    from fewer samples with it (docs/log.md, docs/log-nlvr.md). Its cost is per update, not per sample.

    Raises:
        ParamsError: a group that the model does not have; nothing left to train.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ParamsError("params.yaml: `optimizer.groups` freezes every part of the model; nothing is left to train")
    chosen = chosen_groups(module, params.groups)
    taken = {id(p) for parameters in chosen.values() for p in parameters}
    rest = [p for p in trained if id(p) not in taken]
    of_blocks = set(map(id, block_matrices(module)))
    parts = _optimizers(rest, params, GroupParams(), of_blocks)
    for name, parameters in chosen.items():
        group = params.groups[name]
        own = [p for p in parameters if p.requires_grad]
        parts += _optimizers(own, params, group, of_blocks if group.kind is None else set(map(id, own)))
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _optimizers(
    parameters: list[nn.Parameter], params: OptimizerParams, group: GroupParams, for_muon: set[int]
) -> list[torch.optim.Optimizer]:
    """Of one group; `group` says what differs from `params`. for_muon: whose matrices Muon would have."""
    decay = params.weight_decay if group.weight_decay is None else group.weight_decay
    lr = params.lr if group.lr is None else group.lr
    kind = group.kind or params.kind
    # A group with a rate but no kind of its own has it in Muon, too, in the same proportion.
    muon_lr = params.muon_lr * (lr / params.lr if params.lr else 1.0) if group.kind is None else 0.0
    if kind == "muon":
        kind, muon_lr, lr = params.kind, lr if group.lr is not None else params.muon_lr or lr, params.lr
    matrices = [p for p in parameters if muon_lr and p.ndim == 2 and id(p) in for_muon]
    taken = set(map(id, matrices))
    others = parameter_groups([p for p in parameters if id(p) not in taken], decay)
    found: list[torch.optim.Optimizer] = []
    if others and kind == "sgd":
        found.append(torch.optim.SGD(others, lr=lr, momentum=0.9 if group.momentum is None else group.momentum))
    elif others:
        made = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        devices = {parameter.device.type for parameter in parameters}
        found.append(
            made(
                others,
                lr=lr,
                betas=(params.betas[0], params.betas[1]),
                eps=params.eps,
                fused=devices <= {"cpu", "cuda"},  # about a tenth of a small model's step
            )
        )
    if matrices:
        dtype = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[params.muon_dtype]
        momentum = 0.95 if group.momentum is None else group.momentum
        found.append(Muon(matrices, lr=muon_lr, weight_decay=decay, momentum=momentum, dtype=dtype))
    return found


def learning_rate_factor(step: int, *, total: int, params: OptimizerParams) -> float:
    """What `lr` is multiplied with at update `step` (from 0) of `total`.

    Rises linearly over the first `warmup_fraction` of the updates, then falls to zero (linear, cosine), stays
    (constant), is multiplied with `decay_by` after each share `decay_at` of all updates (steps), or falls with the root
    of the updates' number (inverse_sqrt; Vaswani et al. 2017). Not below `floor / lr`, once warm.
    The first update already moves, and the last one still does.
    """
    warmup = round(params.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    floor = params.floor / params.lr if params.lr else 0.0
    return max(floor, _decayed(step, warmup, total, params))


def _decayed(step: int, warmup: int, total: int, params: OptimizerParams) -> float:
    if params.schedule in ("constant", "steps"):
        return params.decay_by ** sum(step >= round(share * total) for share in params.decay_at)
    if params.schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    left = max(0.0, (total - step) / max(1, total - warmup))
    return left if params.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def build_scheduler(
    optimizer: torch.optim.Optimizer, total: int, params: OptimizerParams
) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total=total, params=params)
    )
