"""Weight averages as the result of a run: an exponential moving average, or the best validations' snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlp_models.common.io import atomic_write, hash_file
from vlp_models.common.log import get_logger
from vlp_models.errors import CheckpointError, ParamsError, explain_system_error
from vlp_models.params import SnapshotParams
from vlp_models.params.schema import suggestion
from vlp_models.training.module import TrainingModule
from vlp_models.training.resume import hash_file_of, is_intact, write_hash
from vlp_models.training.sharding import own_part, sharded_like, whole

logger = get_logger(__name__)


class WeightAverage(Callback):
    """Exponential moving average: average = decay * average + (1 - decay) * weights after every update.

    Buffers (running statistics, codebooks) are copied without averaging. The average is part of the resume state.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._step = -1

    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._step = trainer.global_step
        # A new run's average starts as its weights; a resumed run's is whole in the checkpoint.
        current = pl_module.model.state_dict()
        source = self._average or current
        self._average = {name: sharded_like(source[name].detach(), tensor).clone() for name, tensor in current.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        # average = decay * average + (1 - decay) * weights, of the part that this process holds
        weights = {name for name, _ in pl_module.model.named_parameters(remove_duplicate=False)}
        for name, tensor in pl_module.model.state_dict().items():
            if name in weights and tensor.is_floating_point():
                own_part(self._average[name]).lerp_(own_part(tensor), 1 - self.decay)
            else:
                own_part(self._average[name]).copy_(own_part(tensor))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._average = self._whole()

    def copy_to(self, model: nn.Module) -> None:
        """Replace the weights of `model` by the average."""
        if self._average:
            model.load_state_dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._whole()}

    def _whole(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self._average.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["average"])


class Snapshots(Callback):
    """Keep the weights of the `keep` best validations in `work`; the average is often better than any of them (XGPT
    averages four).

    The resume state lists the best. Files that the resume point being written or one of the two before it lists are
    kept even if they are no longer among the best, so that a run resumed from there finds them. This must come before
    the resume points, and after the callback that validates.
    """

    def __init__(self, work: Path, params: SnapshotParams) -> None:
        self.params = params
        self._work = work
        self._best: dict[int, float] = {}  # update -> the metric's value
        self._listed: list[list[int]] = []  # the updates that each of the last three resume points lists

    def check(self, metrics: Iterable[str]) -> None:
        """
        Raises:
            ParamsError: the validation has no such metric.
        """
        metric, names = self.params.metric, sorted(metrics)
        if metric not in names:
            raise ParamsError(
                f"params.yaml: `snapshots.metric: {metric}`: not a validation metric{suggestion(metric, names)}"
            )

    def offer(self, module: TrainingModule, step: int, validation: dict[str, float]) -> None:
        """Save the weights if this validation is one of the best; call it on every process.

        Raises:
            ParamsError: the validation has no such metric.
            CheckpointError: the file can't be written.
        """
        self.check(validation)
        self._best[step] = validation[self.params.metric]
        best_steps = self._ranked()[: self.params.keep]
        self._best = {best_step: self._best[best_step] for best_step in best_steps}
        if step not in self._best:
            return
        # All processes gather, and the first one writes.
        weights = {name: whole(tensor.detach()).cpu().clone() for name, tensor in module.model.state_dict().items()}
        if module.trainer.is_global_zero:
            try:
                with atomic_write(self._file(step), sync=True) as partial:
                    save_file(weights, partial)
                    # Before the snapshot gets its name, so that none is without a hash.
                    write_hash(self._file(step), hash_file(partial))
            except OSError as error:
                raise CheckpointError(
                    f"{self._file(step)}: cannot be written: {explain_system_error(error)}"
                ) from error

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()  # the first process has written the last snapshot

    def copy_to(self, model: nn.Module) -> None:
        """Replace the weights of `model` by the average of the kept ones, or by the best ones.

        Buffers (running statistics, counters) are those of the best. Without any validation the last weights stay.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        ranked = self._ranked()  # best first
        if not ranked:
            logger.warning("snapshots: the run had no validation; using the last weights")
            return
        files = [self._file(step) for step in (ranked if self.params.average else ranked[:1])]
        for file in files:
            if not is_intact(file):
                raise CheckpointError(
                    f"{file}: missing, or damaged (its sha256 does not match); delete {self._work} to start over"
                )
        # Buffers are those of the best; parameters are averaged, in float64.
        snapshots = [load_file(file) for file in files]
        result = dict(snapshots[0])
        if len(snapshots) > 1:
            for name, _ in model.named_parameters(remove_duplicate=False):
                mean = torch.stack([weights[name].double() for weights in snapshots]).mean(0)
                result[name] = mean.to(snapshots[0][name].dtype)
        model.load_state_dict(result)

    def state_dict(self) -> dict[str, Any]:
        """Called when a resume point is written: also deletes the files that no resume point lists any more."""
        # The resume point being written and the two before it: a run may resume from any of them.
        self._listed = [*self._listed, list(self._best)][-3:]
        listed = {step for steps in self._listed for step in steps}
        for file in self._work.glob("snapshot-*.safetensors"):
            if int(file.stem.partition("-")[2]) not in listed:
                file.unlink(missing_ok=True)
                hash_file_of(file).unlink(missing_ok=True)
        return {"best": dict(self._best), "listed": self._listed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = {int(step): float(value) for step, value in state_dict["best"].items()}
        self._listed = [list(steps) for steps in state_dict["listed"]]

    def _ranked(self) -> list[int]:
        """Return the updates, best first; the earlier of equal ones first, NaN last."""
        sign = 1 if self.params.mode == "min" else -1

        def rank(step: int) -> tuple[bool, float, int]:
            value = self._best[step]
            if math.isnan(value):
                return True, 0.0, step
            return False, sign * value, step

        return sorted(self._best, key=rank)

    def _file(self, step: int) -> Path:
        return self._work / f"snapshot-{step:08d}.safetensors"
