"""Optimizers (AdamW, Adam, SGD, Muon), their learning rates, and the parts of a model with settings of their own.

`optimizer` of a run in params.yaml sets the defaults, and `optimizer.groups` what differs for named parts of the model,
including which ones are frozen.

Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Math, options and defaults are
those of torch.optim.Muon, which always iterates in bfloat16. Here the iteration runs in float32 on hardware without
native bfloat16 (it takes a quarter of the time there), and matrices of equal shape are processed together.

Shape suffixes: N matrices of one shape, H rows, W columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.common.device import has_native_bfloat16
from vlp_models.errors import ParamsError
from vlp_models.models.layers.blocks import BLOCKS
from vlp_models.models.protocols import GroupsParameters
from vlp_models.params import GroupParams, OptimizerParams
from vlp_models.params.schema import suggestion
from vlp_models.training.sharding import own_part, sharded_like, whole_like

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-7
MAX_BATCHED_SIDE = 512  # larger matrices use the processor fully on their own, and stacking would only copy them


def named_groups(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return name -> parameters: the model's own `parameter_groups`, or its top-level children.

    A task's model contains the pretrained one as `model`: the result has that model's groups and the other children
    (`head`). A parameter that two parts share belongs to the first.
    """
    if isinstance(module, GroupsParameters):
        return module.parameter_groups()
    groups: dict[str, list[nn.Parameter]] = {}
    for name, child in module.named_children():
        groups |= named_groups(child) if name == "model" else {name: list(child.parameters())}
    # A shared parameter stays in the first group that has it; groups without any parameter are left out.
    used_ids: set[int] = set()
    for name, parameters in groups.items():
        groups[name] = [p for p in parameters if id(p) not in used_ids]
        used_ids |= set(map(id, parameters))
    return {name: parameters for name, parameters in groups.items() if parameters}


def select_groups(
    module: nn.Module, params: Mapping[str, GroupParams], where: str = "optimizer"
) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the groups that `params` names.

    Args:
        where: the section of params.yaml that contains `groups`, for messages.

    Raises:
        ParamsError: the model has no such group, or two groups share a parameter.
    """
    available = named_groups(module) if params else {}
    owner: dict[int, str] = {}
    for name in params:
        if name not in available:
            key = f"params.yaml: `{where}.groups.{name}`"
            raise ParamsError(f"{key}: the model has no such part{suggestion(name, available)}")
        for parameter in available[name]:
            if owner.setdefault(id(parameter), name) != name:
                raise ParamsError(f"params.yaml: `{where}.groups`: {owner[id(parameter)]} and {name} share a parameter")
    return {name: available[name] for name in params}


def check_groups(module: nn.Module, params: Mapping[str, GroupParams], where: str) -> None:
    """Check the groups of a run before it starts; a model on the meta device is enough.

    Raises:
        ParamsError: see `select_groups`; or nothing is left to train.
    """
    groups = select_groups(module, params, where)
    frozen: set[int] = set()  # in the first epoch
    for name, parameters in groups.items():
        if params[name].frozen or params[name].frozen_epochs:
            frozen |= set(map(id, parameters))
    if all(id(p) in frozen for p in module.parameters()):
        raise ParamsError(f"params.yaml: `{where}.groups` freezes every part of the model; nothing is left to train")


class Freezing:
    """Keep parts of a model unchanged, parameters and running statistics, forever or for the first epochs.

    A frozen module is in eval mode: no dropout, and its running statistics stay. Frozen parameters need no gradient.
    But DDP and FSDP must know all that are trained later from the start: with them the gradients of those are dropped
    before each update. An optimizer skips parameters without a gradient: no decay, no momentum.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, GroupParams]) -> None:
        """params: the group settings by name, as `optimizer.groups` has them."""
        self._module = module
        self._until: dict[int, float] = {}  # id of a parameter -> the first epoch that trains it, from 0
        for name, parameters in select_groups(module, params).items():
            group = params[name]
            for parameter in parameters:
                if group.frozen:
                    parameter.requires_grad_(False)
                    self._until[id(parameter)] = float("inf")
                elif group.frozen_epochs and parameter.requires_grad:
                    self._until[id(parameter)] = group.frozen_epochs

    def train(self, epoch: int, *, all_gradients: bool = False) -> None:
        """Set training mode, except for what is frozen in this epoch.

        all_gradients: also compute gradients that are dropped until their parameters thaw.
        """
        self._module.train()
        # A module is in eval mode if all of its parameters are frozen; one without parameters (dropout) follows its
        # parents.
        frozen = {id(p) for p in self.frozen(epoch)}
        if not all_gradients:
            for parameter in self._module.parameters():
                if self._until.get(id(parameter), math.inf) < math.inf:
                    parameter.requires_grad_(id(parameter) not in frozen)
        for module in self._module.modules() if frozen else ():
            parameters = list(module.parameters())
            if parameters and all(id(p) in frozen for p in parameters):
                module.eval()

    def frozen(self, epoch: int) -> Iterable[nn.Parameter]:
        return [p for p in self._module.parameters() if epoch < self._until.get(id(p), 0)]

    def drop_gradients(self, epoch: int) -> None:
        for parameter in self.frozen(epoch):
            parameter.grad = None


def build_optimizer(module: nn.Module, params: OptimizerParams) -> torch.optim.Optimizer:
    """Return AdamW or Adam; with `muon_lr`, Muon for the matrices of the transformer blocks; with `groups`, their own
    settings.

    Muon makes the singular values of each update equal. On the synthetic data, tiny models trained from scratch needed
    fewer samples with it (docs/design/training.md). It adds a cost per update, not per sample.

    Raises:
        ParamsError: the model lacks a group.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = select_groups(module, params.groups)
    grouped = {id(p) for parameters in groups.values() for p in parameters}
    ungrouped = [p for p in trained if id(p) not in grouped]
    in_blocks = set(map(id, block_matrices(module)))
    # Parameters in no group of `optimizer.groups` come first, so that their rate is the one that is logged.
    parts = _group_optimizers(ungrouped, params, GroupParams(), in_blocks)
    for name, parameters in groups.items():
        group = params.groups[name]
        trained_in_group = [p for p in parameters if p.requires_grad]
        # A group that names its optimizer gets it for all of its matrices, not only for those of the blocks.
        muon_candidates = in_blocks if group.kind is None else set(map(id, trained_in_group))
        parts += _group_optimizers(trained_in_group, params, group, muon_candidates)
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _group_optimizers(
    parameters: list[nn.Parameter], params: OptimizerParams, group: GroupParams, muon_candidates: set[int]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of one group.

    Args:
        group: what differs from `params`.
        muon_candidates: ids of the parameters whose matrices Muon may update.
    """
    decay = params.weight_decay if group.weight_decay is None else group.weight_decay
    lr = params.lr if group.lr is None else group.lr
    kind = group.kind or params.kind
    uses_muon = kind == "muon" or (group.kind is None and params.muon_lr > 0)
    # A group that sets a rate but no kind scales Muon's rate in the same proportion.
    muon_lr = params.muon_lr * (lr / params.lr if params.lr else 1.0)
    if kind == "muon":
        # The group's rate is Muon's; what Muon can't update gets the run's optimizer and rate.
        muon_lr = lr if group.lr is not None else params.muon_lr or lr
        kind, lr = params.kind, params.lr
    # Muon takes the matrices; embeddings, heads, biases and norms stay with Adam or SGD.
    matrices = [p for p in parameters if uses_muon and p.ndim == 2 and id(p) in muon_candidates]
    in_muon = set(map(id, matrices))
    remaining = parameter_groups([p for p in parameters if id(p) not in in_muon], decay)
    optimizers: list[torch.optim.Optimizer] = []
    if remaining and kind == "sgd":
        momentum = 0.9 if group.momentum is None else group.momentum
        optimizers.append(torch.optim.SGD(remaining, lr=lr, momentum=momentum))
    elif remaining:
        adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        devices = {parameter.device.type for parameter in parameters}
        optimizers.append(
            adam(
                remaining,
                lr=lr,
                betas=(params.betas[0], params.betas[1]),
                eps=params.eps,
                fused=devices <= {"cpu", "cuda"},  # saves about a tenth of a small model's step
            )
        )
    if matrices:
        dtype = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[params.muon_dtype]
        momentum = 0.95 if group.momentum is None else group.momentum
        optimizers.append(Muon(matrices, lr=muon_lr, weight_decay=decay, momentum=momentum, dtype=dtype))
    return optimizers


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return up to three groups: matrices with weight decay; biases, normalization and other vectors without, as in
    BERT; and scalars, which are never sharded and so need a group of their own."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.ndim == 0], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def block_matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers in transformer blocks: no embeddings, heads or poolers."""
    layers: dict[nn.Linear, None] = {}  # in order, each once: blocks may be in blocks
    for block in [m for m in module.modules() if isinstance(m, BLOCKS)]:
        layers |= dict.fromkeys(m for m in block.modules() if isinstance(m, nn.Linear))
    return [layer.weight for layer in layers if layer.weight.requires_grad]


def build_scheduler(
    optimizer: torch.optim.Optimizer, total: int, params: OptimizerParams
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler that multiplies every group's rate by `learning_rate_factor`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total=total, params=params)
    )


def learning_rate_factor(step: int, *, total: int, params: OptimizerParams) -> float:
    """Return the factor for `lr` at update `step` (from 0) of `total`.

    It rises linearly over the first `warmup_fraction` of the updates. Then it falls to zero (linear, cosine), stays
    (constant), is multiplied by `decay_by` at each fraction `decay_at` of all updates (steps), or falls with the
    inverse square root of the update's number (inverse_sqrt; Vaswani et al. 2017). After warm-up it is at least
    `min_lr / lr`.
    The first and the last update both have a rate above zero.
    """
    warmup = round(params.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    # From 1 at the end of the warm-up to 0 after the last update
    remaining = max(0.0, (total - step) / max(1, total - warmup))
    if params.schedule in ("constant", "steps"):
        factor = params.decay_by ** sum(step >= round(share * total) for share in params.decay_at)
    elif params.schedule == "inverse_sqrt":
        # Close to 1 at the end of the warm-up, where the linear rise ends.
        factor = math.sqrt(max(1, warmup) / (step + 1))
    elif params.schedule == "linear":
        factor = remaining
    else:
        factor = 0.5 * (1 - math.cos(math.pi * remaining))
    return max(params.min_lr / params.lr if params.lr else 0.0, factor)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with parameters of their own as one: one step, one schedule, one state."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([p for part in self.parts for group in part.param_groups for p in group["params"]], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Expose the parts' own group dicts, so that a scheduler sets the parts' rates."""
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


def orthogonalize(matrices_NHW: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of each matrix close to 1 (between 0.7 and 1.2) by Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices_NHW.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the Gram matrix of the shorter side is cheaper
        x = x.mT
    # The iteration converges for singular values up to 1; the Frobenius norm is at least the largest one.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        # x <- a x + (b G + c G^2) x with G = x x'
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """B = momentum * B + (1 - momentum) * gradient, then w = w (1 - lr * decay) - lr * ratio * orthogonalize(update).

    The update is that of Nesterov momentum, the next B for the same gradient. The ratio is 0.2 * sqrt(max(H, W)), so
    that AdamW's learning rates fit.

    dtype: of the iteration; None: bfloat16 where the hardware has it, otherwise float32. float64 weights stay float64.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        for p in weights:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # Of sharded matrices, this process's rows; only the iteration needs whole ones, and every process runs it.
        local_weights = [own_part(p) for p in weights]
        gradients = [own_part(p.grad) for p in weights]
        momenta = [own_part(self.state[p]["momentum_buffer"]) for p in weights]
        # B = momentum * B + (1 - momentum) * gradient; the direction is the next B, if the gradient stayed the same.
        momentum = group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, momenta, momentum)
        torch._foreach_mul_(local_weights, 1 - group["lr"] * group["weight_decay"])
        for p, weight, update in zip(local_weights, weights, self._orthogonalize(weights, directions), strict=True):
            # The update's root mean square is 1 / sqrt(max(H, W)); the ratio makes it 0.2, about AdamW's.
            ratio = math.sqrt(max(weight.shape)) * 0.2
            p.add_(own_part(sharded_like(update, weight)), alpha=-group["lr"] * ratio)

    def _orthogonalize(self, weights: list[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthogonalized directions, whole also where weights are sharded."""
        # Processes of a CPU that hold the same weights divide the matrices: the iterations take as long as half of a
        # small model's step. On GPUs and with sharded weights every process computes all of them.
        rank, processes = 0, 1
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if in_group and all(own_part(p) is p and p.device.type == "cpu" for p in weights):
            rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # Small matrices of equal shape, device and type are stacked; a large one is a group of its own.
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, weight in enumerate(weights):
            if i % processes == rank:
                is_small = max(weight.shape) <= MAX_BATCHED_SIDE
                groups[(weight.shape, weight.device, weight.dtype, None if is_small else i)].append(i)
        updates = list(directions)
        for indices in groups.values():
            first = weights[indices[0]]
            stacked_NHW = torch.stack([whole_like(directions[i], weights[i]) for i in indices])
            updated_NHW = orthogonalize(stacked_NHW, dtype=self._iteration_dtype(first.device, first.dtype))
            for i, update in zip(indices, updated_NHW.unbind(), strict=True):
                updates[i] = update
        if processes == 1:
            return updates
        # Add up over processes. In each place all processes but one have zeros, so no digit changes.
        parts = []
        for i, (update, p) in enumerate(zip(updates, weights, strict=True)):
            parts.append(update.to(p.dtype) if i % processes == rank else torch.zeros_like(p))
        flat = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(flat)
        return [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in weights]), weights, strict=True)]

    def _iteration_dtype(self, device: torch.device, weight_dtype: torch.dtype) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        if weight_dtype == torch.float64:
            return torch.float64
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
