"""A model out of FSDP: whole weights on the first process, in the module that was there before. Not run on GPUs yet."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


class WholeWeights(Callback):
    """Collects the weights at the end of training, which takes every process; `weights` is empty on all but the first,
    and under other strategies."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):
            state = trainer.strategy.lightning_module_state_dict()
            self.weights = {name.removeprefix("model."): weight for name, weight in state.items()}


def put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Takes FSDP's wrappers off the blocks of `model`, and gives it these weights instead of its pieces."""
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
