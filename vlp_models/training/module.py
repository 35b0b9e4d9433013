"""What Lightning runs at each step: one module for pretraining and fine-tuning alike."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Pixels, Regions
from vlp_models.errors import CheckpointError, NonFiniteLossError
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.ranks import count_over_ranks, mean_over_ranks, sizes_over_ranks
from vlp_models.params import OptimizerParams
from vlp_models.training.optim import build_optimizer, build_scheduler
from vlp_models.training.strategy import clip_norm

# Streams of random numbers: each is a function of (seed, stream, micro-batch), dropout's also of the rank. Corruption
# is drawn for the batch of all processes, each of which takes its rows (objectives/ranks.py).
DROPOUT, CORRUPTION, VALIDATION = 0, 1, 2


class LossFunction(Protocol):
    """`update`: the number of the optimiser's update, from 0; None in validation. `generator`: for corruption."""

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> Loss: ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One of the micro-batches that an update adds up."""

    sample_ids: tuple[str, ...]
    values: dict[str, Tensor]  # the loss and its parts, detached, of all processes


class TrainingModule(LightningModule):
    """Losses, optimiser, and all randomness as a function of the step.

    Dropout and corruption are seeded anew for every micro-batch from (seed, number of the micro-batch). A resumed run
    therefore draws the same numbers without any generator's state being saved.
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
    ) -> None:
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
        self._window_update = -1
        self._batch: Batch | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        update = self.trainer.global_step
        if update != self._window_update:
            self.window, self._window_update = [], update
        torch.manual_seed(self._draw_seed(DROPOUT, self.micro_batches, self.global_rank))
        loss = self.loss(batch, update=update, generator=self._generator(CORRUPTION, self.micro_batches))
        self.micro_batches += 1
        self._batch = batch
        total = mean_over_ranks(loss.total)
        self.window.append(MicroBatch(sample_ids=batch.sample_ids, values={"loss": total, **loss.parts}))
        if not torch.isfinite(total):  # on every process, whichever it came from
            raise self._non_finite("loss", float(total))
        return loss.total

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clips the norm over all parameters; the last chance to refuse an update that would spoil the weights."""
        clip = self.optimizer.clip_norm or float("inf")
        self.gradient_norm = clip_norm(self.trainer.strategy.model, self.model, clip)
        if not torch.isfinite(self.gradient_norm):
            raise self._non_finite("gradient norm", float(self.gradient_norm))
        self.learning_rate = float(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]
        optimizer = build_optimizer(self.model, self.optimizer)
        scheduler = build_scheduler(optimizer, self.total_steps, self.optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device, non_blocking=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["micro_batches"] = self.micro_batches

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
        """Mean loss and parts over all processes' samples, with the same corruption every time. Leaves training as it
        was."""
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        self.model.eval()
        try:
            for i, batch in enumerate(batches):
                with self.trainer.precision_plugin.val_step_context():
                    moved = batch.to(self.device, non_blocking=True)
                    loss = self.loss(moved, update=None, generator=self._generator(VALIDATION, i))
                size = count_over_ranks(len(batch))
                for name, value in {"loss": mean_over_ranks(loss.total), **loss.parts}.items():
                    sums[name] += float(value) * size
                    counts[name] += size
        finally:
            self.model.train()
        return {f"val_{name}": total / counts[name] for name, total in sums.items()}

    def _draw_seed(self, stream: int, number: int, rank: int = 0) -> int:
        sequence = np.random.SeedSequence([self.seed, stream, number, rank])
        return int(sequence.generate_state(1, np.uint64)[0])

    def _generator(self, stream: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._draw_seed(stream, number))

    def _non_finite(self, what: str, value: float) -> NonFiniteLossError:
        """Writes down what led there, and says where."""
        step = self.trainer.global_step
        samples = [i for micro_batch in self.window for i in micro_batch.sample_ids]
        broken = _non_finite_inputs(cast(Batch, self._batch))
        record = {
            "step": step,
            what.replace(" ", "_"): str(value),
            "losses": [{k: str(float(v)) for k, v in m.values.items()} for m in self.window],
            "sample_ids": samples,
            "non_finite_inputs": broken,
        }
        of_rank = f"-rank-{self.global_rank}" if self.trainer.world_size > 1 else ""
        file = self.work / f"non-finite-step-{step}{of_rank}.json"
        file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        inputs = f"The input of {', '.join(broken)} is itself not finite. " if broken else ""
        return NonFiniteLossError(
            f"step {step}: the {what} is {value}; stopped before the update, the weights are as they were. {inputs}"
            f"Samples: {', '.join(samples[:8])}{' ...' if len(samples) > 8 else ''}; all of them, with their losses: "
            f"{file}. Look at these samples, or lower the learning rate, then run again: it resumes at the last "
            "checkpoint if neither params nor data changed"
        )


def _non_finite_inputs(batch: Batch) -> list[str]:
    if isinstance(batch.image, Regions):
        tensors = [batch.image.features_BRF, batch.image.boxes_BR4, batch.image.class_probs_BRC]
    else:
        tensors = [cast(Pixels, batch.image).pixels_B3HW]
    bad_B = ~torch.stack([t.flatten(1).isfinite().all(1) for t in tensors]).all(0)
    return [sample_id for sample_id, bad in zip(batch.sample_ids, bad_B.tolist(), strict=True) if bad]
