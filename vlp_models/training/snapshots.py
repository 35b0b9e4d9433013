"""The weights after the best validations: their average is often better than any of them (XGPT averages four)."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import nn

from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import SnapshotParams
from vlp_models.params.schema import nearest
from vlp_models.training.module import TrainingModule


class Snapshots(Callback):
    """Keeps the weights of the `keep` best validations in `work`, and which they are in the resume state.

    A file that the last two resume points list stays, also once a better one has come: a run that goes on from there
    finds what it had. Must come before the resume points, and after whatever validates.
    """

    def __init__(self, work: Path, params: SnapshotParams) -> None:
        self.params = params
        self._work = work
        self._best: dict[int, float] = {}  # update -> the metric's value
        self._saved: list[list[int]] = []  # what the last resume points list

    def offer(self, module: TrainingModule, step: int, validation: dict[str, float]) -> None:
        """After a validation: keeps the weights if it was one of the best. On every process.

        Raises:
            ParamsError: the validation has no such metric.
            CheckpointError: the file can't be written.
        """
        metric = self.params.metric
        if metric not in validation:
            raise ParamsError(f"params.yaml: `snapshots.metric: {metric}`{nearest(metric, validation)}")
        self._best[step] = validation[metric]
        self._best = {kept: self._best[kept] for kept in self._ranked()[: self.params.keep]}
        if step in self._best and module.trainer.is_global_zero:
            file = self._file(step)
            partial = file.with_name(f".{file.name}.partial")
            weights = {name: tensor.detach().cpu().clone() for name, tensor in module.model.state_dict().items()}
            try:
                save_file(weights, partial)
                partial.replace(file)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise CheckpointError(f"{file}: can't be written: {error}; make room on the disk") from error

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()  # the first process has written the last one

    def copy_to(self, model: nn.Module) -> None:
        """Puts the average of the kept weights in place of the model's, or the best ones alone. What is no parameter
        (running statistics, counters) is the best one's. Without a validation the weights stay the last ones.

        Raises:
            CheckpointError: a file is missing.
        """
        ranked = self._ranked()
        if not ranked:
            print("snapshots: there was no validation; the result is the last weights", file=sys.stderr)
            return
        try:
            kept = [load_file(self._file(step)) for step in (ranked if self.params.average else ranked[:1])]
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._work}: a snapshot is missing: {error}; delete the folder to start anew"
            ) from error
        result = dict(kept[0])
        for name, _ in model.named_parameters(remove_duplicate=False):
            if len(kept) > 1:
                result[name] = torch.stack([weights[name].double() for weights in kept]).mean(0).to(kept[0][name].dtype)
        model.load_state_dict(result)

    def state_dict(self) -> dict[str, Any]:
        """Asked for when a resume point is written."""
        self._saved = [*self._saved, list(self._best)][-2:]
        listed = {step for steps in self._saved for step in steps}
        for file in self._work.glob("snapshot-*.safetensors"):
            if int(file.stem.partition("-")[2]) not in listed:
                file.unlink(missing_ok=True)
        return {"best": dict(self._best), "saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = {int(step): float(value) for step, value in state_dict["best"].items()}
        self._saved = [list(steps) for steps in state_dict["saved"]]

    def _ranked(self) -> list[int]:
        """Best first; of equal ones the earlier. What is no number is the worst."""
        sign = 1 if self.params.better == "lower" else -1

        def place(step: int) -> tuple[bool, float, int]:
            value = self._best[step]
            return math.isnan(value), 0.0 if math.isnan(value) else sign * value, step

        return sorted(self._best, key=place)

    def _file(self, step: int) -> Path:
        return self._work / f"snapshot-{step:08d}.safetensors"
