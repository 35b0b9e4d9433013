"""Shard weights, gradients and optimizer state over the processes of a training (FSDP2, torch's `fully_shard`).

Each process holds 1/n of every tensor. Attention and feed-forward nets, which hold most of the weights of a
transformer, gather theirs when they are called and free them afterwards; the rest of the model (embeddings, norms,
heads, convolutions) is gathered for the whole step. Numbers are those of DDP up to float32's order of summation.

Checkpoints contain whole tensors, and look like those of one process: a run may go on with another number of processes,
or with DDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward

# What gathers its own weights -> its methods besides `forward` that read them
UNITS: dict[type[nn.Module], tuple[str, ...]] = {MultiHeadAttention: ("cross", "step", "project"), FeedForward: ()}


# ---- Tensors --------------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part, in the same memory; an ordinary tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Return a whole tensor, which every process has, sharded as `example`; without communication."""
    tensor = tensor.to(example.device)
    if not isinstance(example, DTensor):
        return tensor
    # None: every process has the whole tensor, so nothing is sent.
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


def whole_like(part: Tensor, example: Tensor) -> Tensor:
    """Gather the tensor whose local part, sharded as `example`, is `part`."""
    if not isinstance(example, DTensor):
        return part
    mesh, placements = example.device_mesh, example.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=example.shape, stride=example.stride()
    ).full_tensor()


def clip_norm(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip the gradient norm over all parameters in place, as `torch.nn.utils.clip_grad_norm_`; return the norm before.

    Gradients may be sharded; all processes get the same norm.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return nn.utils.clip_grad_norm_(parameters, limit)
    sharded = [own_part(gradient) for gradient in gradients if isinstance(gradient, DTensor)]
    replicated = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    # Each process has a part of the sharded gradients, so their squares add up; the replicated ones count once.
    square = torch.stack([n.square() for n in torch._foreach_norm(sharded)]).sum()
    dist.all_reduce(square)
    for gradient in replicated:
        square = square + gradient.square().sum()
    norm = square.sqrt()
    torch._foreach_mul_([*sharded, *replicated], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def average_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Average over the processes the gradients of the scalars, which `fully_shard` leaves to its caller.

    A scalar that only some processes used has a gradient of zero on the others.
    """
    scalars = [parameter for parameter in parameters if parameter.ndim == 0 and parameter.requires_grad]
    if not scalars:
        return
    used = [parameter.grad is not None for parameter in scalars]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in scalars]
    # (2, N): each scalar's gradient, and on how many processes it has one
    values_2N = torch.stack([torch.stack(gradients).double(), torch.tensor(used, device=scalars[0].device).double()])
    dist.all_reduce(values_2N)
    for parameter, total, count in zip(scalars, *values_2N.unbind(), strict=True):
        parameter.grad = (total / dist.get_world_size()).to(parameter.dtype) if count > 0 else None


# ---- Modules --------------------------------------------------------------------------------------------------------


class Sharding:
    """Shards a module in place, until `undo`."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, methods: Iterable[str]) -> None:
        """
        Args:
            methods: those of the module, besides `forward`, within which its weights are read.
        """
        self._modules = list(module.modules())
        # What sharding changes of each module, for `undo`: its class, its attributes' names, its hooks.
        self._before = [(type(child), set(vars(child)), _hooks(child)) for child in self._modules]
        # A scalar cannot be divided: every process holds it, and averages its gradient itself (`average_replicated`).
        scalars = {parameter for parameter in module.parameters() if parameter.ndim == 0}
        units = [(child, UNITS[type(child)]) for child in self._modules if type(child) in UNITS]
        for unit, names in [*units, (module, tuple(methods))]:
            fully_shard(unit, mesh=mesh, ignored_params=scalars)
            for name in names:
                register_fsdp_forward_method(unit, name)
        # Attributes that sharding added to each module
        self._added = []
        for child, (_, attributes, _) in zip(self._modules, self._before, strict=True):
            self._added.append(set(vars(child)) - attributes)

    def undo(self) -> None:
        """Restore the modules as before, with whole weights; every process must call it."""
        # Free the weights that forward passes have gathered, which leaves sharded parameters.
        for module in self._modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        gathered: dict[int, nn.Parameter] = {}  # a weight that several modules share stays shared
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    if id(parameter) not in gathered:
                        gathered[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
                    module._parameters[name] = gathered[id(parameter)]
        for module, (kind, _, hooks), added in zip(self._modules, self._before, self._added, strict=True):
            module.__class__ = kind
            for name in added:
                vars(module).pop(name)
            # Only hooks that sharding has added go.
            for name, keys in hooks.items():
                for key in set(vars(module)[name]) - keys:
                    del vars(module)[name][key]


def _hooks(module: nn.Module) -> dict[str, set[Any]]:
    """Return name -> keys of the module's tables of hooks."""
    return {name: set(table) for name, table in vars(module).items() if name.endswith("_hooks") and table is not None}
