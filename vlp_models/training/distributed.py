"""Where and in what a training computes: processes (DDP, FSDP), precision, CPU threads.

ddp: every process holds the whole model; gradients are averaged. fsdp: every process holds a part of the weights,
gradients and optimizer state (contrib/fsdp). In both cases several processes compute the gradients that one would from
the same batches: the losses are normalized over all of them (training/normalization.py, objectives/distributed.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.checkpoint import checkpoint

from vlp_models.common.device import cpu_count, has_native_bfloat16, is_main_process, use_cuda
from vlp_models.common.log import get_logger
from vlp_models.common.loopback import require_loopback
from vlp_models.common.plugins import import_target
from vlp_models.common.portable import is_portable, use_portable_kernels
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import ParamsError
from vlp_models.models.layers.blocks import BLOCKS
from vlp_models.params import TrainerParams
from vlp_models.training import sharded_strategy

logger = get_logger(__name__)

Precision = Literal["32-true", "bf16-mixed"]

# A model without pixel input below this many parameters runs many short operations, which more threads slow down.
SMALL_MODEL = 4_000_000


def make_trainer(params: TrainerParams, model: nn.Module, *, accumulate: int, precision: Precision) -> Trainer:
    """Return Lightning's Trainer for the section `trainer` of params.yaml.

    Raises:
        ParamsError: a device or precision this machine lacks, a strategy that does not support the model or the
            device, or a number of processes other than the launcher started. MissingToolError: no contrib/fsdp.
    """
    # With RANK, a launcher such as torchrun has started the processes, and decided how many there are.
    processes = params.devices * params.num_nodes
    started = int(os.environ.get("WORLD_SIZE", processes)) if "RANK" in os.environ else processes
    if started != processes:
        raise ParamsError(
            f"params.yaml: `trainer.devices: {params.devices}` times `trainer.num_nodes: {params.num_nodes}` is "
            f"{processes} processes, but torchrun started {started} (WORLD_SIZE, a variable); make them equal, or "
            "unset RANK and WORLD_SIZE if an earlier job has left them"
        )
    if processes > 1 and "RANK" not in os.environ:
        require_loopback()
    on_cpu = params.accelerator == "cpu" or (params.accelerator == "auto" and not torch.cuda.is_available())
    # Each process would normalize by its own part of the batch; only DDP on GPUs synchronizes the statistics.
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if processes > 1 and on_cpu and norms and params.strategy != "fsdp":
        raise ParamsError(
            f"params.yaml: the model has batch normalization ({norms[0]}), which several processes can't synchronize "
            "on a CPU; set `trainer.devices: 1`, or switch batch normalization off in `models.<name>.config`"
        )
    try:
        strategy: Strategy | str = "auto"
        if params.strategy == "fsdp":
            strategy = import_target(sharded_strategy())(params, model, processes)
        elif params.strategy == "ddp" or processes > 1:
            # A task leaves parts of the model unused (ISM's poolers, for example), which plain DDP treats as an error.
            strategy = DDPStrategy(find_unused_parameters=True)
        return Trainer(
            accelerator=params.accelerator,
            devices=params.devices,
            num_nodes=params.num_nodes,
            strategy=strategy,
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


@contextmanager
def block_options(model: nn.Module, params: TrainerParams) -> Iterator[None]:
    """Apply `activation_checkpointing` and `compile` to the transformer blocks of `model` while the block runs."""
    blocks = [block for block in model.modules() if isinstance(block, BLOCKS)]
    options = [name for name in ("activation_checkpointing", "compile") if getattr(params, name)]
    if options and not blocks:
        raise ParamsError(
            f"params.yaml: `trainer.{options[0]}` applies to transformer blocks of this package and to subclasses of "
            "`FamilyBlock`; the model has none"
        )
    # A block's methods are replaced on the object; the class, and so the weights' names, stay as they are.
    changed = [(block, name) for block in blocks for name in getattr(block, "passes", ("forward",))]
    for block, name in changed if options else ():
        method = getattr(block, name)
        if params.compile:  # dynamic: each batch has another number of packed tokens
            method = torch.compile(method, dynamic=True)
        if params.activation_checkpointing:
            method = partial(checkpoint, method, use_reentrant=False)
        setattr(block, name, method)
    try:
        yield
    finally:
        for block, name in changed:
            # Without the attribute of the object, the class's own method is called again.
            vars(block).pop(name, None)


def set_threads(model: nn.Module, trainer: TrainerParams) -> None:
    """Set torch's CPU threads to `trainer.torch_threads`.

    0: one for a small model without pixel input (docs/design/training.md has timings), otherwise torch's default. With
    one thread a small model gets the same weights no matter how many trainings run in parallel.
    """
    use_portable_kernels()
    if trainer.torch_threads:
        torch.set_num_threads(trainer.torch_threads)
        return
    # A task's model contains the pretrained one, which declares its inputs.
    declared = [getattr(module, "inputs", None) for module in model.modules()]
    images = [inputs.image for inputs in declared if isinstance(inputs, ModelInputs)]
    without_pixels = bool(images) and not any(isinstance(image, PixelInput) for image in images)
    if without_pixels and sum(p.numel() for p in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    elif is_portable() and is_main_process() and not use_cuda(trainer.accelerator):
        logger.info(
            "trainer.reproducible: portable: %d of this machine's %d processors train, one per process; "
            "the run's `cpu_processes` starts more, `reproducible: machine` uses all threads",
            *(trainer.devices, cpu_count()),
        )


def choose_precision(params: TrainerParams) -> Precision:
    """Return the precision of a run that starts on this machine.

    `auto` is bf16-mixed on a GPU that supports bfloat16, otherwise 32-true: on CPUs, the same numbers everywhere.
    `bf16-where-native` is also bf16-mixed on a CPU where bfloat16 is faster (`has_native_bfloat16`).
    """
    if params.precision in ("32-true", "bf16-mixed"):  # set explicitly: the same on every machine
        return cast(Precision, params.precision)
    on_gpu = use_cuda(params.accelerator)
    if params.precision == "auto":
        return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    return "bf16-mixed" if has_native_bfloat16(torch.device("cuda" if on_gpu else "cpu")) else "32-true"


def read_precision_and_threads(checkpoint: Path) -> tuple[Precision, int]:
    """Return what the run that saved a resume point computed with, without reading its weights."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return cast(Precision, state["precision"]), state["threads"]


def keep_threads(saved: int, trainer: TrainerParams, title: str) -> None:
    """Set the number of threads that a resumed run started with: another one changes the rounding.

    With `trainer.parallel_finetune` it is that of several trainings at a time, also if this one is resumed alone.
    `trainer.torch_threads` and the number of processors go first.
    """
    if trainer.torch_threads or saved == torch.get_num_threads() or use_cuda(trainer.accelerator):
        return
    if saved > cpu_count():
        logger.warning(
            "%s: started with %d threads, this machine has %d processors: rounding differs", title, saved, cpu_count()
        )
        return
    logger.info("%s: keeping %d threads from the start of the run", title, saved)
    torch.set_num_threads(saved)
