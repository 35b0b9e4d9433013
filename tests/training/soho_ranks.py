"""SOHO in two processes, for rank_cases.py: three micro-batches, and a dictionary that follows all of them.

Statistics of batch normalization are each process's own, so they are held still; everything else is of the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from soho_toys import ALL, batch_of, build
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.objectives.moving_average import update_moving_averages
from vlp_models.training.normalization import normalize, total_over_ranks

IMAGES, TEXTS = 5, 2
UPDATES = ("paper", "released")  # the dictionary's rules
ENDS = (True, True, False, True)  # which micro-batches end an update


def rows(first: int, last: int, seed: int) -> Batch:
    whole = replace(batch_of(IMAGES, TEXTS, seed=seed), image_ids=("a", "b", "a", "c", "b"))
    texts = torch.arange(TEXTS * first, TEXTS * last)
    text = whole.text.select(texts)
    width = int(text.mask_BT.sum(1).max()) if last > first else 1
    cut = {name: getattr(text, name)[:, :width] for name in ("ids_BT", "mask_BT")}
    return replace(
        whole,
        sample_ids=whole.sample_ids[first:last],
        image_ids=whole.image_ids[first:last],
        image=whole.image.select(torch.arange(first, last)),
        text=replace(text, **cut, owner_N=text.owner_N - first),
    )


class Learner(nn.Module):
    def __init__(self, update: str) -> None:
        super().__init__()
        self.model = build(mvm_probability=0.6, dictionary_update=update, revive_after=2).train()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def forward(self, batch: Batch, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        losses = self.model.pretraining_losses(
            batch, objectives=dict.fromkeys(ALL), generator=generator, mask_probability=0.4
        )
        weighed = WeightedLosses(losses=losses, weights=dict.fromkeys(ALL, 1.0))
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return normalize(weighed, total_over_ranks(weighed).counts) * world_size


def learn(update: str, rank: int = 0, world_size: int = 1) -> dict[str, Tensor]:
    """Return gradients of three micro-batches, the last one on the first process only, and the dictionary."""
    learner: nn.Module = Learner(update)
    model = learner.model
    if world_size > 1:
        learner = nn.parallel.DistributedDataParallel(learner, find_unused_parameters=True)
    for number, ends in enumerate(ENDS):
        cuts = (0, IMAGES) if number == 3 else (0, 2, IMAGES)
        share = (0, IMAGES) if world_size == 1 else ((*cuts, IMAGES)[rank], (*cuts, IMAGES)[rank + 1])
        learner(rows(*share, seed=number), number).backward()
        if ends:
            update_moving_averages(model)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **{f"dictionary.{name}": b for name, b in model.dictionary.named_buffers()}}
