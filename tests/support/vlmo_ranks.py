"""VLMo's losses on batches split over two processes: `python vlmo_ranks.py RANK FOLDER`, run by
models/test_vlmo_pretraining.py, which imports the single-process reference from here."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_vlmo import build_tiny, losses, random_batch, trimmed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vlp_models.data.batch import Batch
from vlp_models.models.vlmo.model import VLMo
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.training.normalization import mean_losses, normalize, total_over_ranks
from vlp_models.training.sharding import whole

ALL = ("itc", "itm", "mlm", "mim")
# name -> objectives, pairs, config
CASES: dict[str, tuple[tuple[str, ...], int, dict[str, object]]] = {
    "all": (ALL, 7, {}),
    "itc": (("itc",), 7, {}),
    "itc_both": (("itc",), 7, {"contrast": "both"}),
    "itm": (("itm",), 7, {}),
    "single": (ALL, 1, {}),
}


@dataclass(frozen=True)
class Case:
    model: VLMo
    objectives: tuple[str, ...]
    batch: Batch


def make_case(name: str) -> Case:
    """Return seven pairs: two in different processes have the same image, and so do two in the same process."""
    objectives, size, config = CASES[name]
    return Case(build_tiny(**config), objectives, random_batch(size, image_ids="abbcdae"))


class Learner(nn.Module):
    """The module that DDP wraps: the loss is in the forward pass, as in the training loop."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.objectives = case.model, case.objectives

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found = losses(self.model, batch, self.objectives, seed=3)
        weighted = WeightedLosses(losses=found, weights=dict.fromkeys(found, 1.0))
        counts = total_over_ranks(weighted)
        times = dist.get_world_size() if dist.is_initialized() else 1
        return normalize(weighted, counts.counts) * times, mean_losses([counts])


def learn(
    case: Case, rank: int = 0, world_size: int = 1, *, sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of the whole batch and the parts, as computed by this process."""
    learner: nn.Module = Learner(case)
    if sharded:
        from vlp_models.contrib.fsdp.strategy import Sharding

        sharding = Sharding(learner, init_device_mesh("cpu", (world_size,)), ())
    elif world_size > 1:
        learner = nn.parallel.DistributedDataParallel(learner, find_unused_parameters=True)
    size = len(case.batch)
    first, last = size * rank // world_size, size * (rank + 1) // world_size
    batch = trimmed(case.batch, torch.arange(first, last)) if first < last else case.batch.empty()
    total, parts = learner(batch)
    total.backward()
    if sharded:
        sharding.average_replicated(case.model.parameters())
    gradients = {
        name: whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in case.model.named_parameters()
    }
    return gradients, {name: float(value) for name, value in parts.items()}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name in CASES:
        gradients, parts = learn(make_case(name), rank, 2)
        save_file(gradients, folder / f"{name}-{rank}.safetensors")
        (folder / f"{name}-{rank}.json").write_text(json.dumps(parts))
    for name in CASES:
        gradients, _ = learn(make_case(name), rank, 2, sharded=True)
        save_file(gradients, folder / f"sharded-{name}-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
