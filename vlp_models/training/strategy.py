"""One process or many: Lightning's Trainer for `trainer` of params.yaml, refused in plain words where it can't be.

ddp: every process holds the whole model; gradients are averaged. fsdp: every process holds a share of weights,
gradients and optimiser state, and has whole weights a transformer block at a time. In both, the losses see to it that
several processes learn what one would from the same batches (objectives/ranks.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from vlp_models.errors import ParamsError
from vlp_models.models.layers.blocks import BLOCKS
from vlp_models.params import OptimizerParams, TrainerParams
from vlp_models.training.precision import Precision


def make_trainer(
    params: TrainerParams, optimizer: OptimizerParams, model: nn.Module, *, accumulate: int, precision: Precision
) -> Trainer:
    """
    Raises:
        ParamsError: numbers that can't be, a device or precision this machine lacks, a strategy that does not go with
            the optimiser, the model or the device, or another number of processes than the launcher started.
    """
    for name in ("devices", "num_nodes", "checkpoint_every_steps", "log_every_steps"):
        if getattr(params, name) < 1:
            raise ParamsError(f"params.yaml: `trainer.{name}: {getattr(params, name)}` must be at least 1")
    processes = params.devices * params.num_nodes
    started = int(os.environ.get("WORLD_SIZE", processes)) if "RANK" in os.environ else processes
    if started != processes:
        raise ParamsError(
            f"params.yaml: `trainer.devices: {params.devices}` times `trainer.num_nodes: {params.num_nodes}` are "
            f"{processes} processes, but torchrun has started {started}; make them agree"
        )
    on_cpu = params.accelerator == "cpu" or (params.accelerator == "auto" and not torch.cuda.is_available())
    _check_strategy(params, optimizer, model, processes, on_cpu)
    try:
        return Trainer(
            accelerator=params.accelerator,
            devices=params.devices,
            num_nodes=params.num_nodes,
            strategy=_strategy(params, processes),
            sync_batchnorm=processes > 1 and not on_cpu,
            precision=precision,
            max_epochs=-1,  # the number of updates decides
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ResumableLoader shares the data out itself
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
            raise ParamsError(f"{where} needs GPUs; on a CPU take `ddp`")
        if optimizer.muon_lr:
            raise ParamsError(
                f"{where} hands the optimiser flat pieces of matrices, and Muon (`optimizer.muon_lr`) needs them "
                "whole; set `muon_lr: 0` for AdamW, or take `ddp`"
            )
        if optimizer.ema_decay:
            raise ParamsError(f"{where} can't average weights yet; set `optimizer.ema_decay: 0`, or take `ddp`")
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if processes > 1 and on_cpu and norms:
        raise ParamsError(
            f"params.yaml: the model normalises over the batch ({norms[0]}), which several processes can't share on a "
            "CPU; set `trainer.devices: 1`, or switch batch normalisation off in `models.<name>.config`"
        )


def _strategy(params: TrainerParams, processes: int) -> Strategy | str:
    if params.strategy == "fsdp":
        return FSDPStrategy(auto_wrap_policy=set(BLOCKS), state_dict_type="full", use_orig_params=True)
    if params.strategy == "ddp" or processes > 1:
        # A task leaves parts of the model unused (ISM's poolers, say), which plain DDP takes for an error.
        return DDPStrategy(find_unused_parameters=True)
    return "auto"


def clip_norm(root: Any, module: nn.Module, limit: float) -> torch.Tensor:
    """Clips the norm over all parameters in place; returns what it was. root: what the strategy made of `module`."""
    if hasattr(root, "clip_grad_norm_"):  # FSDP: the pieces of all processes together
        return root.clip_grad_norm_(limit)
    return nn.utils.clip_grad_norm_(module.parameters(), limit)
