"""What the training loop costs next to a bare one: same model, batches, optimizer and clipping. One checkpoint of 12
steps is part of it.

128 wide, 2/2/2/2 layers, batches of 128, as benchmarks/training_step.py. Compares CPU time, which another busy process
disturbs less than the clock.

    OMP_NUM_THREADS=1 python benchmarks/training_loop.py

Writes benchmarks/results/training_loop.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_result
from torch import nn
from torch.utils.data import Dataset
from training_step import SIZES, random_batch

from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.models import build_model
from vlp_models.params import ObjectiveParams, OptimizerParams, RecipeParams, ScheduledSamplingParams, TrainerParams
from vlp_models.training.module import LossFunction
from vlp_models.training.optim import build_optimizer, build_scheduler
from vlp_models.training.run import Plan, fit
from vlp_models.training.scheduled_sampling import make_loss

STEPS, ROUNDS = 12, 3
OPTIMIZER = OptimizerParams(lr=1e-4)


class Ready(Dataset[Any]):
    """As many batches as steps, made beforehand: reading data is no part of this."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> int:
        return index


def loader() -> ResumableLoader:
    batch = random_batch(SIZES["demo"])
    return ResumableLoader(Ready(), batch_size=1, collate=lambda _: batch, seed=0, shuffle=False)  # type: ignore[arg-type]


def model_and_loss() -> tuple[nn.Module, LossFunction]:
    torch.manual_seed(0)
    model = build_model("tden", SIZES["demo"].config, SIZES["demo"].facts)
    recipe = RecipeParams(objectives={name: ObjectiveParams() for name in ("mlm", "moc", "ism", "msg")})
    return model, make_loss(model, recipe, ScheduledSamplingParams(), name="tden")


def bare(model: nn.Module, loss: LossFunction) -> None:
    optimizer = build_optimizer(model, OPTIMIZER)
    scheduler = build_scheduler(optimizer, STEPS, OPTIMIZER)
    generator = torch.Generator().manual_seed(1)
    for update, batch in enumerate(loader()):
        total = loss(batch, update=update, generator=generator).mean
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        optimizer.step()
        scheduler.step()


def ours(model: nn.Module, loss: LossFunction) -> None:
    with tempfile.TemporaryDirectory() as work:
        fit(
            model,
            loss,
            lambda rank, world_size: (loader(), None),
            plan=Plan(seed=0, max_epochs=1, max_steps=0, accumulate=1, optimizer=OPTIMIZER),
            trainer=TrainerParams(
                accelerator="cpu",
                devices=1,
                precision="32-true",
                num_workers=0,
                checkpoint_every_steps=10**9,
                log_every_steps=1,
                torch_threads=0,
            ),
            work=Path(work),
            title="benchmark",
        )


def main() -> None:
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(ROUNDS + 1):
        for name, run in (("bare", bare), ("ours", ours)):
            model, loss = model_and_loss()
            start = time.process_time()
            run(model, loss)
            seconds[name].append((time.process_time() - start) / STEPS)
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first round warms up
    record = {
        "claim": "CPU seconds a step: the training loop (logging every step) against a bare loop",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "bare": round(median["bare"], 4),
        "ours": round(median["ours"], 4),
        "overhead_percent": round(100 * (median["ours"] / median["bare"] - 1), 1),
    }
    print(write_result("training_loop", record))


if __name__ == "__main__":
    main()
