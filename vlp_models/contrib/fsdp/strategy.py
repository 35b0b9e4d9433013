"""Lightning's strategy for torch's `fully_shard` (FSDP2), with whole tensors in checkpoints.

Each process holds 1/n of every tensor. Attention and feed-forward nets, which hold most of the weights of a
transformer, gather theirs when they are called and free them afterwards; the rest of the model (embeddings, norms,
heads, convolutions) is gathered for the whole step. Numbers are those of DDP up to float32's order of summation.

Checkpoints contain whole tensors, and look like those of one process: a run may go on with another number of processes,
or with DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vlp_models.errors import ParamsError
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward
from vlp_models.params import TrainerParams
from vlp_models.training.optim import CombinedOptimizer
from vlp_models.training.sharding import own_part, sharded_like, whole

# What gathers its own weights -> its methods besides `forward` that read them
UNITS: dict[type[nn.Module], tuple[str, ...]] = {MultiHeadAttention: ("cross", "step", "project"), FeedForward: ()}


def make_strategy(params: TrainerParams, model: nn.Module, processes: int) -> ShardedStrategy:
    """Return the strategy for a training of `model`.

    Raises:
        ParamsError: the trainer or the model has something that does not work with sharded weights.
    """
    if params.compile:
        raise ParamsError("params.yaml: `trainer.compile` does not work with `trainer.strategy: fsdp`; set one of them")
    # Each process would normalize by its own part of the batch; only DDP on GPUs synchronizes the statistics.
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if processes > 1 and norms:
        raise ParamsError(
            f"params.yaml: `trainer.strategy: fsdp` does not support batch normalization ({norms[0]}); use `ddp`"
        )
    return ShardedStrategy(processes)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for `fully_shard`, with whole tensors in checkpoints."""

    def __init__(self, processes: int) -> None:
        super().__init__(data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def shard(self, module: nn.Module, methods: Iterable[str]) -> Sharding:
        """Shard a training's module; see `Sharding`."""
        return Sharding(module, self.device_mesh["data_parallel"], methods)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._gathered(cast(nn.Module, self.model).state_dict()))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = cast(nn.Module, self.lightning_module)
        # Checkpoints have whole tensors: each process takes its part of them.
        current = module.state_dict()
        state = dict(checkpoint["state_dict"])
        for name, tensor in current.items():
            if name in state:
                state[name] = sharded_like(state[name], tensor)
        module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # Lightning may pass its wrapper of an optimizer instead of the optimizer.
        return cast("dict[str, Any]", self._gathered(getattr(optimizer, "_optimizer", optimizer).state_dict()))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if "parts" in state:  # a CombinedOptimizer
                pairs = zip(cast(CombinedOptimizer, optimizer).parts, state["parts"], strict=True)
                optimizer.load_state_dict({"parts": [_sharded_state(part, part_state) for part, part_state in pairs]})
            else:
                optimizer.load_state_dict(_sharded_state(optimizer, state))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # The base class reads one file of whole tensors; ModelParallelStrategy expects sharded ones.
        return Strategy.load_checkpoint(self, Path(checkpoint_path), weights_only)

    def _gathered(self, value: Any) -> Any:
        """Return a nested structure with whole tensors, on the CPU of the first process; elsewhere without tensors."""
        if isinstance(value, Mapping):
            return {key: self._gathered(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._gathered(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        # Gathering needs all processes, also those that drop the result.
        full = whole(value)
        return full.detach().cpu() if self.is_global_zero else None


def _sharded_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with tensors sharded as the parameters that they belong to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        sharded[index] = dict(values)
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:  # not a count of steps
                sharded[index][name] = sharded_like(value, parameter)
    return {**state, "state": sharded}


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

    def average_replicated(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average over the processes the gradients of the scalars, which `fully_shard` leaves to its caller.

        A scalar that only some processes used has a gradient of zero on the others.
        """
        scalars = [parameter for parameter in parameters if parameter.ndim == 0 and parameter.requires_grad]
        if not scalars:
            return
        used = [parameter.grad is not None for parameter in scalars]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in scalars]
        # (2, N): each scalar's gradient, and on how many processes it has one
        used_N = torch.tensor(used, device=scalars[0].device)
        values_2N = torch.stack([torch.stack(gradients).double(), used_N.double()])
        dist.all_reduce(values_2N)
        for parameter, total, count in zip(scalars, *values_2N.unbind(), strict=True):
            parameter.grad = (total / dist.get_world_size()).to(parameter.dtype) if count > 0 else None

    def clip_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradient norm over all parameters in place, as `torch.nn.utils.clip_grad_norm_`.

        Returns the norm before, the same on all processes. Gradients may be sharded.
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
