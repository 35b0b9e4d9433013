"""The Lightning module of every training: losses, optimizer step, and all randomness as a function of the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.data.inputs import find_non_finite
from vlp_models.errors import CheckpointError, NonFiniteLossError
from vlp_models.objectives.distributed import sizes_over_ranks
from vlp_models.objectives.loss import Count, WeightedLosses
from vlp_models.objectives.moving_average import update_moving_averages
from vlp_models.params import OptimizerParams
from vlp_models.training.normalization import (
    Totals,
    at_least_one,
    mean_losses,
    normalize,
    sum_counts,
    total_over_ranks,
)
from vlp_models.training.optim import Freezing, build_optimizer, build_scheduler

# Random streams. Each is a function of (seed, stream, micro-batch); dropout also of the rank. Corruption is drawn for
# the batch of all processes, and each process takes its rows (objectives/distributed.py).
DROPOUT, CORRUPTION, VALIDATION = 0, 1, 2


class LossFunction(Protocol):
    """The loss of a batch.

    update: number of the optimizer's update, from 0; None in validation. generator: for corruption.
    """

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses: ...


@runtime_checkable
class CountsItems(Protocol):
    """A loss that can count its items without being computed."""

    def count_items(
        self, batch: Batch, *, update: int | None, generator: torch.Generator
    ) -> Mapping[str, Count] | None:
        """Return loss -> the `count` that a call with the same arguments would give, or None if it is unknown."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A loss that may need all micro-batches of an update before the first one's loss is computed."""

    looks_ahead: bool

    def look_ahead(self, window: Sequence[Batch], seed: Callable[[int], None]) -> None: ...


class Sharding(Protocol):
    """A module whose weights are spread over the processes (contrib/fsdp)."""

    def average_replicated(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of the weights that every process holds."""
        ...

    def clip_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradient norm over all parameters of all processes; return the norm before."""
        ...

    def undo(self) -> None:
        """Restore the module with whole weights; every process must call it."""
        ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One of the micro-batches that an update accumulates."""

    sample_ids: tuple[str, ...]
    totals: Totals


class TrainingModule(LightningModule):
    """Losses, optimizer, and all randomness as a function of the step.

    Dropout and corruption are reseeded for every micro-batch from (seed, number of the micro-batch). A resumed run
    therefore draws the same numbers without saving any generator's state.

    Losses are divided once, by the counts over all micro-batches and processes of an update (normalization.py):

    - One micro-batch per update: the counts are known.
    - Several micro-batches, one loss: the gradients are rescaled after the last micro-batch.
    - Several micro-batches, several losses with counts of their own: the counts must be known before the first backward
      pass. The loss counts the items of the remaining micro-batches (`CountsItems`). If it can't, it is computed on
      them without gradients, which adds up to a third to the cost of an update.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        seed: int,
        total_steps: int,
        optimizer: OptimizerParams,
        work: Path,
        updates_per_epoch: int,
        remaining: Callable[[], Sequence[Batch]] = tuple,
    ) -> None:
        """
        Args:
            remaining: returns the micro-batches that follow the current one in the same update.
        """
        super().__init__()
        self.model = model
        self.loss = loss
        self.seed = seed
        self.total_steps = total_steps
        self.optimizer = optimizer
        self.work = work
        self.micro_batches = 0  # since the run started, on this rank
        self.window: list[MicroBatch] = []  # of the current update, or of the last one between updates
        self.learning_rate = 0.0  # of the last update
        self.gradient_norm: Tensor | None = None  # of the last update, before clipping
        self.freezing = Freezing(model, optimizer.groups)
        self.sharding: Sharding | None = None
        self._updates_per_epoch = updates_per_epoch
        self._remaining = remaining
        self._window_update = -1  # the update that `window` belongs to
        self._mode_epoch = -1  # the epoch that training mode was last set for
        self._counts: dict[str, Tensor] = {}  # the divisors of this update's losses
        self._buffers_before = BufferCopy(model)  # before the current update
        self._batch: Batch | None = None

    def configure_model(self) -> None:
        """Shard the model if the strategy does that. Called before the optimizer is built."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None and self.sharding is None:
            self.sharding = shard(self, ("training_step", "validation_losses"))  # the methods that read the weights
            self.freezing = Freezing(self.model, self.optimizer.groups)  # sharding replaced the parameters

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        update = self.trainer.global_step
        is_first = update != self._window_update
        if is_first:
            # A new update: its window is empty, and a failed update is undone to the buffers as they are now.
            self.window, self._window_update = [], update
            self._buffers_before.take()
            self._set_training_mode()
            if isinstance(self.loss, LooksAhead) and self.loss.looks_ahead:
                # Contrast over the whole update: embed all of its pairs first, from the same random states as below.
                window = [batch, *(b.to(self.device, non_blocking=True) for b in self._remaining())]
                with spare_buffers(self.model):
                    self.loss.look_ahead(window, lambda number: self._seed_dropout(self.micro_batches + number))

        # Dropout and corruption of this micro-batch, by its number in the run.
        self._seed_dropout(self.micro_batches)
        loss = self.loss(batch, update=update, generator=self._generator(CORRUPTION, self.micro_batches))
        totals = total_over_ranks(loss)
        self.micro_batches += 1
        self._batch = batch
        self.window.append(MicroBatch(sample_ids=batch.sample_ids, totals=totals))
        if not torch.stack([part.sum for part in totals.losses.values()]).isfinite().all():  # equal on every process
            raise self._non_finite("loss", float(mean_losses([totals])["loss"]))
        # The divisors are those of the first micro-batch. Several losses need the other micro-batches' counts now; a
        # single loss is rescaled after the last one (`_rescale_gradients`).
        if is_first:
            self._counts = totals.counts
            if len(totals.losses) > 1:
                self._add_remaining_counts(update)
        # DDP and FSDP average over processes, and Lightning over micro-batches; undo both.
        times = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return normalize(loss, self._counts) * times

    @property
    def _epoch(self) -> int:
        """The epoch of the current update, from 0."""
        return int(self.trainer.global_step) // self._updates_per_epoch

    def _set_training_mode(self) -> None:
        """Set training mode once per epoch: which parts are frozen depends on it."""
        if self._mode_epoch != self._epoch:
            self._mode_epoch = self._epoch
            alone = isinstance(self.trainer.strategy, SingleDeviceStrategy)
            self.freezing.train(self._epoch, all_gradients=not alone)

    def _add_remaining_counts(self, update: int) -> None:
        """Add the counts of the update's remaining micro-batches to the divisors."""
        for i, batch in enumerate(self._remaining()):
            number = self.micro_batches + i
            moved = batch.to(self.device, non_blocking=True)
            counts = None
            if isinstance(self.loss, CountsItems):
                counts = self.loss.count_items(moved, update=update, generator=self._generator(CORRUPTION, number))
            if counts is None:
                self._seed_dropout(number)  # counts may depend on what is drawn
                with torch.no_grad(), spare_buffers(self.model):
                    weighted = self.loss(moved, update=update, generator=self._generator(CORRUPTION, number))
                counts = {name: loss.count for name, loss in weighted.losses.items()}
            for name, count in sum_counts(counts, self.device).items():
                self._counts[name] = self._counts.get(name, 0) + count

    def _rescale_gradients(self) -> None:
        """Replace the divisor of a single loss, the first micro-batch's count, by the count of all micro-batches."""
        if len(self.window) == 1 or len(self._counts) > 1:
            return
        # Gradients of the sum were divided by the first micro-batch's count; multiply by that and divide by all counts.
        (name,) = self._counts
        count = torch.stack([micro_batch.totals.counts[name] for micro_batch in self.window]).sum()
        factor = at_least_one(self._counts[name]) / at_least_one(count)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, float(factor))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip the norm over all parameters; refuse an update with a non-finite gradient."""
        if self.sharding is not None:
            self.sharding.average_replicated(self.model.parameters())
        self._rescale_gradients()
        self.freezing.drop_gradients(self._epoch)
        clip = self.optimizer.clip_norm or float("inf")
        clip_norm = nn.utils.clip_grad_norm_ if self.sharding is None else self.sharding.clip_norm
        self.gradient_norm = clip_norm(self.model.parameters(), clip)
        if not torch.isfinite(self.gradient_norm):
            raise self._non_finite("gradient norm", float(self.gradient_norm))
        self.learning_rate = float(optimizer.param_groups[0]["lr"])  # of the parameters outside `groups`, if any

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]
        optimizer = build_optimizer(self.model, self.optimizer)
        scheduler = build_scheduler(optimizer, self.total_steps, self.optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then the buffers that follow moving averages (objectives/moving_average.py)."""
        super().optimizer_step(*args, **kwargs)
        update_moving_averages(self.model)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device, non_blocking=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["micro_batches"] = self.micro_batches
        checkpoint["precision"] = str(self.trainer.precision)
        checkpoint["threads"] = torch.get_num_threads()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.micro_batches = checkpoint["micro_batches"]

    def on_train_start(self) -> None:
        """Check that all processes resumed from the same checkpoint."""
        steps = [step for (step,) in sizes_over_ranks((self.trainer.global_step,))]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.work}: the processes found different checkpoints there (steps by rank: {steps}); all nodes "
                "must share this folder"
            )

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the mean loss and its parts (`val_...`) over all items of all batches and processes.

        Corruption is the same every time. The state of training is left unchanged.
        """
        return {f"val_{name}": float(value) for name, value in mean_losses(self._evaluate(batches)).items()}

    def validation_metrics(self, batches: Iterable[Batch]) -> set[str]:
        """Return the names that `validate` can return, also of parts without any item in these batches."""
        names = {name for totals in self._evaluate(batches) for name in totals.parts}
        return {"val_loss", *(f"val_{name}" for name in names)}

    @torch.no_grad()
    def _evaluate(self, batches: Iterable[Batch]) -> list[Totals]:
        self.model.eval()
        try:
            totals = self.validation_losses(batches)
        finally:
            self._mode_epoch = -1  # sets training mode again, also within an epoch
            self._set_training_mode()
        # `validation_losses` gathered the root module's weights; training's forward pass gathers them again.
        if self.sharding is not None:
            cast(Any, self).reshard()
        return totals

    def validation_losses(self, batches: Iterable[Batch]) -> list[Totals]:
        totals: list[Totals] = []
        for i, batch in enumerate(batches):
            with self.trainer.precision_plugin.val_step_context():
                moved = batch.to(self.device, non_blocking=True)
                loss = self.loss(moved, update=None, generator=self._generator(VALIDATION, i))
                totals.append(total_over_ranks(loss))
        return totals

    def _seed_dropout(self, number: int) -> None:
        torch.manual_seed(self._draw_seed(DROPOUT, number, self.global_rank))

    def _draw_seed(self, stream: int, number: int, rank: int = 0) -> int:
        # SeedSequence hashes the four numbers, so that neighboring seeds and steps give independent streams.
        sequence = np.random.SeedSequence([self.seed, stream, number, rank])
        return int(sequence.generate_state(1, np.uint64)[0])

    def _generator(self, stream: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._draw_seed(stream, number))

    def _non_finite(self, quantity: str, value: float) -> NonFiniteLossError:
        """Restore the buffers from before the update, write a report, and return the error to raise."""
        self._buffers_before.restore()
        step = self.trainer.global_step
        # All samples of the update so far, with the losses of each of its micro-batches
        samples: list[str] = []
        losses: list[dict[str, str]] = []
        for micro_batch in self.window:
            samples += micro_batch.sample_ids
            means = mean_losses([micro_batch.totals])
            # As text, because JSON has neither NaN nor infinity.
            losses.append({name: str(float(mean)) for name, mean in means.items()})
        broken = _non_finite_inputs(cast(Batch, self._batch))
        record = {
            "step": step,
            quantity.replace(" ", "_"): str(value),
            "losses": losses,
            "sample_ids": samples,
            "non_finite_inputs": broken,
        }
        suffix = f"-rank-{self.global_rank}" if self.trainer.world_size > 1 else ""
        file = self.work / f"non-finite-step-{step}{suffix}.json"
        file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        inputs = f"Input that is itself not finite: {', '.join(broken)}. " if broken else ""
        return NonFiniteLossError(
            f"step {step}: the {quantity} is {value}; stopped before the update, weights and buffers are unchanged. "
            f"{inputs}Samples: {', '.join(samples[:8])}{' ...' if len(samples) > 8 else ''}; all samples and their "
            f"losses are in {file}. Check these samples or lower the learning rate, then run again: it resumes from "
            "the last checkpoint if neither params nor data changed"
        )


def _non_finite_inputs(batch: Batch) -> list[str]:
    """Return the samples whose image or target is not finite."""
    bad = set(find_non_finite(batch))
    targets = batch.targets
    if targets is not None and targets.is_floating_point() and len(batch):
        finite_B = targets.reshape(len(batch), -1).isfinite().all(1)
        bad |= {batch.sample_ids[i] for i in (~finite_B).nonzero().flatten().tolist()}
    return [sample_id for sample_id in batch.sample_ids if sample_id in bad]


class BufferCopy:
    """A copy of a model's buffers, to undo a failed update: forward passes change running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers, into the same memory as the last copy where possible."""
        for name, buffer in self._model.named_buffers():
            copy = self._copy.get(name)
            if copy is not None and copy.shape == buffer.shape and copy.device == buffer.device:
                copy.copy_(buffer)
            else:
                self._copy[name] = buffer.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the values back in place."""
        for name, buffer in self._model.named_buffers():
            if name in self._copy:
                buffer.copy_(self._copy[name])


@contextmanager
def spare_buffers(model: nn.Module) -> Iterator[None]:
    """Swap the model's buffers for copies while the block runs, so that forward passes leave the originals unchanged.

    Restoring values in place would instead change buffers that an earlier forward pass saved for its backward pass.
    """
    originals = []
    for module in model.modules():
        originals += [(module, name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    # Modules that share a buffer share its copy.
    spare = {id(buffer): buffer.clone() for _, _, buffer in originals}
    try:
        for module, name, buffer in originals:
            module._buffers[name] = spare[id(buffer)]
        yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer
