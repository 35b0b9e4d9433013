"""An exponential moving average of the weights: often better than the last weights, at the price of a copy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from vlp_models.training.module import TrainingModule


class WeightAverage(Callback):
    """average = decay * average + (1 - decay) * weights after every update; buffers are taken as they are,
    running statistics and codebooks among them.

    Is part of the resume state. `copy_to` puts the average in place of the weights once training has ended.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._step = -1

    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._step = trainer.global_step
        current = pl_module.model.state_dict()
        source = self._average or current
        self._average = {name: source[name].detach().to(tensor.device).clone() for name, tensor in current.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        weights = {name for name, _ in pl_module.model.named_parameters(remove_duplicate=False)}
        for name, tensor in pl_module.model.state_dict().items():
            if name in weights and tensor.is_floating_point():
                self._average[name].lerp_(tensor, 1 - self.decay)
            else:
                self._average[name].copy_(tensor)

    def copy_to(self, model: nn.Module) -> None:
        if self._average:
            model.load_state_dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self._average)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["average"])
