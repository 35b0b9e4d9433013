"""When a training run first used an image: replay its sample order from the settings in its checkpoint.

The order of samples is a function of seed and epoch, so the answer is exact and reads nothing but the shards' index.
`Windows` (training/data.py) assigns batches to updates; here is the same arithmetic without the batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.shards import augmented, streaming
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.order import EpochOrder, choose_order
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError
from vlp_models.params import FinetuneParams, PretrainParams, StreamParams, build, split_start
from vlp_models.params.runs import TrainingParams
from vlp_models.tasks import task_class
from vlp_models.tasks.base import read_options
from vlp_models.training.recipe import make_recipe


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What decides a training run's samples and their order.

    run                       `pretrain/NAME` or `finetune/NAME`
    start                     the checkpoint it started from
    view, captioned           what it read of the data; `captioned`: only images with captions
    texts_per_image           consecutive texts of one image
    captioner                 `augment.NAME`; empty: none
    control                   captions of the images' own replaced the generated ones
    repeats                   updates that use the same batches, one after the other
    rewards_use_all_captions  its reward uses the captions of all training images from the first update on
    """

    run: str
    start: str
    params: TrainingParams
    view: str
    captioned: bool = False
    texts_per_image: int = 1
    captioner: str = ""
    control: bool = False
    repeats: int = 1
    rewards_use_all_captions: bool = False

    @staticmethod
    def from_settings(run: str, settings: Mapping[str, Any]) -> TrainingRun:
        """Build from the run's section of params.yaml, or of a checkpoint's `provenance.params`."""
        kind, name = split_start(run)
        if kind == "pretrain":
            p = build(PretrainParams, dict(settings), where=f"pretrain.{name}", file=run)
            recipe = make_recipe(p.recipe, supported=sorted(p.recipe.objectives), section=run)
            return TrainingRun(
                run=run,
                start=p.start or f"initial/{p.model}",
                params=p,
                view=p.view,
                captioned=p.captions_per_image > 0,
                repeats=recipe.updates_per_batch,
            )
        f = build(FinetuneParams, dict(settings), where=f"finetune.{name}", file=run)
        task = task_class(f.task)
        options = read_options(task, f.options, where=f"{run}.options")
        return TrainingRun(
            run=run,
            start=f.start,
            params=f,
            view=task.training_view(options),
            captioned=task.needs_captions(options),
            texts_per_image=f.texts_per_image,
            captioner=f.augment.captions,
            control=f.augment.control,
            rewards_use_all_captions=getattr(options, "self_critical", None) is not None,
        )

    def parts(self, datasets: Collection[str]) -> dict[str, TrainingRun]:
        """Return the trainings that the run consists of: itself, or one for each of its parts (`finetune.NAME.parts`).

        Args:
            datasets: those of the shards, for a run without `sources`.

        Returns:
            A description, such as `in part 2 of 4, ` -> training; empty for a run that is trained as a whole.
        """
        count = self.params.parts if isinstance(self.params, FinetuneParams) else 1
        if count == 1:
            return {"": self}
        sources = self.params.sources or dict.fromkeys(datasets, 1)
        parts = {}
        for number in range(1, count + 1):
            of_part = {f"{dataset}/{number}-of-{count}": repeats for dataset, repeats in sources.items()}
            parts[f"in part {number} of {count}, "] = replace(self, params=replace(self.params, sources=of_part))
        return parts

    def find_first_exposure(
        self, shards: Path, image_ids: Set[str], *, stream: StreamParams, regions: bool, generated: Path | None = None
    ) -> FirstExposure | None:
        """Return when the run first trained on one of these images; None: never.

        Args:
            shards: a folder with the manifest and the indices it trained on; the tars are not read.
            stream: how the shards were streamed, if they were.
            regions: whether the model reads regions; pixels otherwise.
            generated: the generated captions, if the run used them.

        Raises:
            DataError: the index is damaged, or the generated captions are missing.
        """
        # A view without images, such as texts, uses none.
        if not VIEWS[self.view].has_image:
            return None
        p = self.params
        base = ShardDataset(
            shards, "train", self.view, p.sources, regions=regions, pixels=not regions, captioned=self.captioned
        )
        # A streamed run shuffles blocks of the packed shards, whose layout decides the order.
        if stream.address:
            base.layout = streaming("layout").of(base.image_spans, stream.block_mb << 20)
        samples: Any = base
        if self.captioner:
            if generated is None or not generated.exists():
                raise DataError(f"{self.run} was trained on generated captions that are missing")
            samples = augmented(base, directory=generated, shards=shards, control=self.control)
        arguments: dict[str, Any] = {"length": len(samples), "batch_size": p.batch_size, "seed": p.seed}
        order: EpochOrder = choose_order(samples, stream, self.texts_per_image)(**arguments)
        updates = Updates(count=p.max_steps or 0, accumulate=p.accumulate, repeats=self.repeats)
        # Without `max_steps` the length of the order decides: epochs times updates per epoch.
        if not p.max_steps:
            updates = replace(updates, count=updates.per_epoch(order.steps) * p.max_epochs)
        return find_first_exposure(samples, image_ids, order, updates)


def run_settings(run: str, provenance: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the run's own settings from a checkpoint's provenance; None if they are missing."""
    kind, name = split_start(run)
    settings = provenance.get("params", {}).get(kind, {}).get(name)
    return settings if isinstance(settings, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How a training turns batches into updates.

    count       updates in total
    accumulate  batches per update
    repeats     updates that use the same batches, one after the other
    """

    count: int
    accumulate: int = 1
    repeats: int = 1

    def per_epoch(self, batches: int) -> int:
        """Return the updates of an epoch with this many batches."""
        if self.repeats > 1 and self.accumulate > 1:  # the incomplete last window is dropped
            return batches // self.accumulate * self.repeats
        return math.ceil(batches / self.accumulate) * self.repeats


@dataclass(frozen=True, kw_only=True)
class FirstExposure:
    """The first epoch and update, from 1, that used an image; the weights before that update never did."""

    epoch: int
    update: int


def find_first_exposure(samples: Any, image_ids: Set[str], order: EpochOrder, updates: Updates) -> FirstExposure | None:
    """Return the first update that uses one of these images; None: no update does.

    Args:
        samples: a `ShardDataset`, or one with generated captions.
    """
    # Row numbers of the samples that show one of the images.
    numbers = samples.find_samples(image_ids)
    per_epoch = updates.per_epoch(order.steps)
    if not len(numbers) or not per_epoch:
        return None
    # Only the epochs that the run reached.
    for epoch in range(math.ceil(updates.count / per_epoch)):
        for batch_number, batch in enumerate(order.batches(epoch)):
            # The first update of the epoch that uses the batch, and its number in the whole training; from 0.
            in_epoch = batch_number // updates.accumulate * updates.repeats
            update = epoch * per_epoch + in_epoch
            if in_epoch >= per_epoch or update >= updates.count:
                break  # the incomplete end of an epoch, or beyond the last update
            if np.isin(batch, numbers).any():
                return FirstExposure(epoch=epoch + 1, update=update + 1)
    return None
