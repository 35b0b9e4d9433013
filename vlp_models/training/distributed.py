"""Where and in what a training computes: processes (DDP, FSDP), precision, CPU threads.

ddp: every process holds the whole model; gradients are averaged. fsdp: every process holds a shard of the weights,
gradients and optimizer state, and gathers whole weights one transformer block at a time. In both cases several
processes learn exactly what one would from the same batches: the losses are normalized over all of them
(training/normalization.py, objectives/distributed.py). FSDP fails at its first step on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from vlp_models.common.device import has_native_bfloat16, use_cuda
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import ParamsError
from vlp_models.models.layers.blocks import BLOCKS
from vlp_models.params import OptimizerParams, TrainerParams

Precision = Literal["32-true", "bf16-mixed"]

# A model without pixel input below this many parameters runs many short operations, which more threads slow down.
SMALL_MODEL = 4_000_000


def make_trainer(
    params: TrainerParams, optimizer: OptimizerParams, model: nn.Module, *, accumulate: int, precision: Precision
) -> Trainer:
    """Return Lightning's Trainer for the section `trainer` of params.yaml.

    Raises:
        ParamsError: an invalid number, a device or precision this machine lacks, a strategy that does not support the
            optimizer, the model or the device, or a number of processes other than the launcher started.
    """
    for name in ("devices", "num_nodes", "checkpoint_every_steps", "log_every_steps"):
        if getattr(params, name) < 1:
            raise ParamsError(f"params.yaml: `trainer.{name}: {getattr(params, name)}` must be at least 1")
    processes = params.devices * params.num_nodes
    started = int(os.environ.get("WORLD_SIZE", processes)) if "RANK" in os.environ else processes
    if started != processes:
        raise ParamsError(
            f"params.yaml: `trainer.devices: {params.devices}` times `trainer.num_nodes: {params.num_nodes}` is "
            f"{processes} processes, but torchrun started {started}; make them equal"
        )
    on_cpu = params.accelerator == "cpu" or (params.accelerator == "auto" and not torch.cuda.is_available())
    _check_strategy(params, optimizer, model, processes, on_cpu)
    try:
        return Trainer(
            accelerator=params.accelerator,
            devices=params.devices,
            num_nodes=params.num_nodes,
            strategy=_make_strategy(params, processes),
            sync_batchnorm=processes > 1 and not on_cpu,
            precision=precision,
            max_epochs=-1,  # `fit` sets the number of updates
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ResumableLoader splits the data between processes itself
            num_sanity_val_steps=0,
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise ParamsError(
            f"params.yaml: `trainer` (accelerator {params.accelerator}, devices {params.devices}, num_nodes "
            f"{params.num_nodes}, strategy {params.strategy}, precision {precision}) does not fit this machine: {error}"
        ) from None


def _check_strategy(
    params: TrainerParams, optimizer: OptimizerParams, model: nn.Module, processes: int, on_cpu: bool
) -> None:
    if params.strategy == "fsdp":
        where = "params.yaml: `trainer.strategy: fsdp`"
        if on_cpu:
            raise ParamsError(f"{where} needs GPUs; use `ddp` on a CPU")
        if optimizer.muon_lr:
            raise ParamsError(
                f"{where} passes flat shards of matrices to the optimizer, and Muon (`optimizer.muon_lr`) needs whole "
                "ones; set `muon_lr: 0` for AdamW, or use `ddp`"
            )
        if optimizer.ema_decay:
            raise ParamsError(f"{where} does not support weight averages; set `optimizer.ema_decay: 0`, or use `ddp`")
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if processes > 1 and on_cpu and norms:
        raise ParamsError(
            f"params.yaml: the model has batch normalization ({norms[0]}), which several processes can't synchronize "
            "on a CPU; set `trainer.devices: 1`, or switch batch normalization off in `models.<name>.config`"
        )


def _make_strategy(params: TrainerParams, processes: int) -> Strategy | str:
    if params.strategy == "fsdp":
        return FSDPStrategy(auto_wrap_policy=set(BLOCKS), state_dict_type="full", use_orig_params=True)
    if params.strategy == "ddp" or processes > 1:
        # A task leaves parts of the model unused (ISM's poolers, for example), which plain DDP treats as an error.
        return DDPStrategy(find_unused_parameters=True)
    return "auto"


def clip_norm(wrapped: Any, module: nn.Module, limit: float) -> Tensor:
    """Clip the gradient norm over all parameters in place; return the norm before clipping.

    Args:
        wrapped: what the strategy wrapped `module` in.
    """
    if hasattr(wrapped, "clip_grad_norm_"):  # FSDP: over the shards of all processes
        return wrapped.clip_grad_norm_(limit)
    return nn.utils.clip_grad_norm_(module.parameters(), limit)


class FullWeights(Callback):
    """Gather FSDP's sharded weights at the end of training, which takes every process.

    `weights` is empty on all ranks but the first, and under other strategies.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):
            state = trainer.strategy.lightning_module_state_dict()
            self.weights = {name.removeprefix("model."): weight for name, weight in state.items()}


def unwrap_fsdp(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Remove FSDP's wrappers from the blocks of `model`, and replace its shards by full weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FullyShardedDataParallel):
                setattr(module, name, child.module)
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._buffers:
            owner._buffers[leaf] = weight
        else:
            owner.register_parameter(leaf, nn.Parameter(weight))


def set_threads(model: nn.Module, trainer: TrainerParams) -> None:
    """Set torch's CPU threads to `trainer.torch_threads`.

    0: one for a small model without pixel input (docs/project/history.md has timings), otherwise torch's default. With
    one thread a small model gets the same weights no matter how many trainings run in parallel.
    """
    if trainer.torch_threads:
        torch.set_num_threads(trainer.torch_threads)
        return
    declared = [getattr(module, "inputs", None) for module in model.modules()]
    inputs = [one for one in declared if isinstance(one, ModelInputs)]
    without_pixels = bool(inputs) and not any(isinstance(one.image, PixelInput) for one in inputs)
    if without_pixels and sum(p.numel() for p in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)


def choose_precision(params: TrainerParams) -> Precision:
    """Return the precision of a run that starts on this machine.

    `auto` is bf16-mixed on a GPU that supports bfloat16, otherwise 32-true: on CPUs, the same numbers everywhere.
    `bf16-where-native` is also bf16-mixed on a CPU with bfloat16 instructions; where they are emulated, bf16 is slower
    than 32-true.
    """
    if params.precision in ("32-true", "bf16-mixed"):
        return cast(Precision, params.precision)
    on_gpu = use_cuda(params.accelerator)
    if params.precision == "auto":
        return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    return "bf16-mixed" if has_native_bfloat16(torch.device("cuda" if on_gpu else "cpu")) else "32-true"


def read_precision(checkpoint: Path) -> Precision:
    """Return the precision of the run that saved a resume point, without reading its weights."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return cast(Precision, state["precision"])
