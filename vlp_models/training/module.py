"""What Lightning runs at each step: one module for pretraining and fine-tuning alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.data.inputs import not_finite
from vlp_models.errors import CheckpointError, NonFiniteLossError
from vlp_models.objectives.loss import Count, Loss, WeightedLosses
from vlp_models.objectives.moving_average import update_moving_averages
from vlp_models.objectives.ranks import sizes_over_ranks
from vlp_models.params import OptimizerParams
from vlp_models.training.buffers import BufferCopy, spare_buffers
from vlp_models.training.groups import Freezing
from vlp_models.training.normalise import Totals, by_name, counts_over_ranks, divided, means, or_one, totals
from vlp_models.training.optim import build_optimizer, build_scheduler
from vlp_models.training.strategy import clip_norm

# Streams of random numbers: each is a function of (seed, stream, micro-batch), dropout's also of the rank. Corruption
# is drawn for the batch of all processes, each of which takes its rows (objectives/ranks.py).
DROPOUT, CORRUPTION, VALIDATION = 0, 1, 2


class LossFunction(Protocol):
    """`update`: the number of the optimiser's update, from 0; None in validation. `generator`: for corruption."""

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> Loss | WeightedLosses: ...


@runtime_checkable
class CountsItems(Protocol):
    """A loss that can say, without computing itself, how many items it will be over."""

    def count_items(
        self, batch: Batch, *, update: int | None, generator: torch.Generator
    ) -> Mapping[str, Count] | None:
        """Loss -> the `count` that calling it with the same arguments would give; None if it can't say."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A loss that may want to see all micro-batches of an update before it is asked for the first one's."""

    looks_ahead: bool

    def look_ahead(self, window: Sequence[Batch], seed: Callable[[int], None]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One of the micro-batches that an update adds up."""

    sample_ids: tuple[str, ...]
    totals: Totals


class TrainingModule(LightningModule):
    """Losses, optimiser, and all randomness as a function of the step.

    Dropout and corruption are seeded anew for every micro-batch from (seed, number of the micro-batch). A resumed run
    therefore draws the same numbers without any generator's state being saved.

    Losses are divided once, by what all micro-batches and processes of the update hold (training/normalise.py). With
    one micro-batch an update, that is known. With several and a single loss, the gradients are made right when the last
    has come. With several micro-batches and several losses, each with a count of its own, the counts must be known
    before the first backward pass: the loss is asked for those of the micro-batches still to come (`CountsItems`), and
    if it can't say, it is computed on them without gradients, which adds up to a third to the cost of an update.
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
        still_to_come: Callable[[], Sequence[Batch]] = tuple,
    ) -> None:
        """
        Args:
            still_to_come: the micro-batches of the update under way that come after the present one.
        """
        super().__init__()
        self.model = model
        self.loss = loss
        self.seed = seed
        self.total_steps = total_steps
        self.optimizer = optimizer
        self.work = work
        self.micro_batches = 0  # seen since the run began, on this rank
        self.window: list[MicroBatch] = []  # of the update under way, or just made
        self.learning_rate = 0.0  # of the last update
        self.gradient_norm: Tensor | None = None  # before clipping, likewise
        self.freezing = Freezing(model, optimizer.groups)
        self._updates_per_epoch = updates_per_epoch
        self._still_to_come = still_to_come
        self._window_update = -1
        self._in_training_mode = -1  # for which epoch
        self._counts: dict[str, Tensor] = {}  # what the losses of this update are divided by
        self._before = BufferCopy(model)  # the update
        self._batch: Batch | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        update = self.trainer.global_step
        first = update != self._window_update
        if first:
            self.window, self._window_update = [], update
            self._before.take()
            self._begin_epoch()
            if isinstance(self.loss, LooksAhead) and self.loss.looks_ahead:
                window = [batch, *(b.to(self.device, non_blocking=True) for b in self._still_to_come())]
                self.loss.look_ahead(window, lambda number: self._seed_dropout(self.micro_batches + number))
        self._seed_dropout(self.micro_batches)
        loss = self.loss(batch, update=update, generator=self._generator(CORRUPTION, self.micro_batches))
        found = totals(loss)
        self.micro_batches += 1
        self._batch = batch
        self.window.append(MicroBatch(sample_ids=batch.sample_ids, totals=found))
        if not torch.stack([part.sum for part in found.losses.values()]).isfinite().all():  # on every process
            raise self._non_finite("loss", float(means([found])["loss"]))
        if first:
            self._counts = found.counts
            if len(found.losses) > 1:
                self._add_counts_to_come(update)
        # DDP and FSDP average over the processes, Lightning over the micro-batches: both are taken back.
        times = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return divided(loss, self._counts) * times

    @property
    def _epoch(self) -> int:
        """Of the update under way, from 0."""
        return int(self.trainer.global_step) // self._updates_per_epoch

    def _begin_epoch(self) -> None:
        """What is frozen depends on the epoch."""
        if self._in_training_mode != self._epoch:
            self._in_training_mode = self._epoch
            self.freezing.train(self._epoch)

    def _add_counts_to_come(self, update: int) -> None:
        for i, batch in enumerate(self._still_to_come()):
            number = self.micro_batches + i
            moved = batch.to(self.device, non_blocking=True)
            counts = None
            if isinstance(self.loss, CountsItems):
                counts = self.loss.count_items(moved, update=update, generator=self._generator(CORRUPTION, number))
            if counts is None:
                self._seed_dropout(number)  # what is drawn then may decide what counts
                with torch.no_grad(), spare_buffers(self.model):
                    loss = self.loss(moved, update=update, generator=self._generator(CORRUPTION, number))
                counts = {name: one.count for name, one in by_name(loss).items()}
            for name, count in counts_over_ranks(counts, self.device).items():
                self._counts[name] = self._counts.get(name, 0) + count

    def _settle_gradients(self) -> None:
        """A single loss was divided by the count of the first micro-batch: now by all of them."""
        if len(self.window) == 1 or len(self._counts) > 1:
            return
        (name,) = self._counts
        count = torch.stack([micro_batch.totals.counts[name] for micro_batch in self.window]).sum()
        factor = or_one(self._counts[name]) / or_one(count)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, float(factor))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clips the norm over all parameters; the last chance to refuse an update that would spoil the weights."""
        self._settle_gradients()
        self.freezing.drop_gradients(self._epoch)
        clip = self.optimizer.clip_norm or float("inf")
        self.gradient_norm = clip_norm(self.trainer.strategy.model, self.model, clip)
        if not torch.isfinite(self.gradient_norm):
            raise self._non_finite("gradient norm", float(self.gradient_norm))
        self.learning_rate = float(optimizer.param_groups[0]["lr"])  # of the ungrouped, where there are any

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]
        optimizer = build_optimizer(self.model, self.optimizer)
        scheduler = build_scheduler(optimizer, self.total_steps, self.optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """And, with the update, what modules have gathered for their own buffers (objectives/moving_average.py)."""
        super().optimizer_step(*args, **kwargs)
        update_moving_averages(self.model)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device, non_blocking=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["micro_batches"] = self.micro_batches
        checkpoint["precision"] = str(self.trainer.precision)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.micro_batches = checkpoint["micro_batches"]

    def on_train_start(self) -> None:
        """
        Raises:
            CheckpointError: the processes went on from different checkpoints.
        """
        steps = [step for (step,) in sizes_over_ranks((self.trainer.global_step,))]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.work}: the processes found different checkpoints there (by rank, of steps {steps}); it must "
                "be a folder that all nodes share"
            )

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The loss and its parts over all batches and processes, each a sum over its items divided by their number;
        with the same corruption every time. Leaves training as it was."""
        found: list[Totals] = []
        self.model.eval()
        try:
            for i, batch in enumerate(batches):
                with self.trainer.precision_plugin.val_step_context():
                    moved = batch.to(self.device, non_blocking=True)
                    found.append(totals(self.loss(moved, update=None, generator=self._generator(VALIDATION, i))))
        finally:
            self._in_training_mode = -1
            self._begin_epoch()
        return {f"val_{name}": float(value) for name, value in means(found).items()}

    def _seed_dropout(self, number: int) -> None:
        torch.manual_seed(self._draw_seed(DROPOUT, number, self.global_rank))

    def _draw_seed(self, stream: int, number: int, rank: int = 0) -> int:
        sequence = np.random.SeedSequence([self.seed, stream, number, rank])
        return int(sequence.generate_state(1, np.uint64)[0])

    def _generator(self, stream: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._draw_seed(stream, number))

    def _non_finite(self, what: str, value: float) -> NonFiniteLossError:
        """Puts the buffers back as they were before the update, writes down what led there, and says where."""
        self._before.put_back()
        step = self.trainer.global_step
        samples = [i for micro_batch in self.window for i in micro_batch.sample_ids]
        broken = _non_finite_inputs(cast(Batch, self._batch))
        record = {
            "step": step,
            what.replace(" ", "_"): str(value),
            "losses": [{k: str(float(v)) for k, v in means([m.totals]).items()} for m in self.window],
            "sample_ids": samples,
            "non_finite_inputs": broken,
        }
        of_rank = f"-rank-{self.global_rank}" if self.trainer.world_size > 1 else ""
        file = self.work / f"non-finite-step-{step}{of_rank}.json"
        file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        inputs = f"The input of {', '.join(broken)} is itself not finite. " if broken else ""
        return NonFiniteLossError(
            f"step {step}: the {what} is {value}; stopped before the update; weights and buffers are as they "
            f"were. {inputs}Samples: {', '.join(samples[:8])}{' ...' if len(samples) > 8 else ''}; all of them, with "
            f"their losses: {file}. Look at these samples, or lower the learning rate, then run again: it resumes at "
            "the last checkpoint if neither params nor data changed"
        )


def _non_finite_inputs(batch: Batch) -> list[str]:
    """Samples whose image or target is not finite."""
    bad = set(not_finite(batch))
    targets = batch.targets
    if targets is not None and targets.is_floating_point() and len(batch):
        finite_B = targets.reshape(len(batch), -1).isfinite().all(1)
        bad |= {batch.sample_ids[i] for i in (~finite_B).nonzero().flatten().tolist()}
    return [sample_id for sample_id in batch.sample_ids if sample_id in bad]
