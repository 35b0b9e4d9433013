"""What a training run learnt from: its samples and their order, made again from what its checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.data.shards.dataset import AugmentedDataset, ShardDataset, read_generated
from vlp_models.data.shards.order import EpochOrder, choose_order
from vlp_models.data.shards.stream import Layout
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError
from vlp_models.forgetting.order import Sight, Updates, first_sight
from vlp_models.params import FinetuneParams, PretrainParams, StreamParams, build, split_start
from vlp_models.params.runs import TrainingParams
from vlp_models.tasks import task_class
from vlp_models.tasks.base import read_options
from vlp_models.training.recipe import make_recipe


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A training run.

    run: `pretrain/NAME` or `finetune/NAME`. start: what it began with. captioner: `augment.NAME`, empty: none.
    view, captioned: of the data. texts_per_image: that are put beside each other.
    scored_by_all: the captions of all training images count in its reward.
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
    scored_by_all: bool = False

    @staticmethod
    def of(run: str, settings: Mapping[str, Any]) -> Learning:
        """
        Args:
            settings: of the run, as params.yaml or a checkpoint's `provenance.params` has them.

        Raises:
            VLPError: settings that this version of the program does not know.
        """
        kind, name = split_start(run)
        if kind == "pretrain":
            p = build(PretrainParams, dict(settings), where=f"pretrain.{name}", file=run)
            recipe = make_recipe(p.recipe, known=p.recipe.objectives, section=run)
            return Learning(
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
        return Learning(
            run=run,
            start=f.start,
            params=f,
            view=task.training_view(options),
            captioned=task.needs_captions(options),
            texts_per_image=f.texts_per_image,
            captioner=f.augment.captions,
            control=f.augment.control,
            scored_by_all=getattr(options, "self_critical", None) is not None,
        )

    def sight(
        self, shards: Path, image_ids: Set[str], *, stream: StreamParams, regions: bool, augmented: Path | None = None
    ) -> Sight | None:
        """When the run first learnt from one of these images; None: it never did.

        Args:
            shards: a folder with the manifest and the indices that it learnt by; the tars are not read.
            stream: by an address, how they were read.
            regions: whether its model reads them; else pixels.
            augmented: the captions that a captioner wrote, where the run took them.

        Raises:
            DataError: the index is damaged, or the written captions are not here.
        """
        if not VIEWS[self.view].has_image:
            return None
        p = self.params
        samples: ShardDataset | AugmentedDataset = ShardDataset(
            shards, "train", self.view, p.sources, regions=regions, pixels=not regions, captioned=self.captioned
        )
        if stream.address:
            samples.layout = Layout.of(samples.places, stream.block_mb << 20)  # type: ignore[misc, union-attr]
        if self.captioner:
            if augmented is None or not augmented.exists():
                raise DataError(f"{self.run} learnt from captions that a model wrote, which are not here")
            samples = AugmentedDataset(samples, read_generated(augmented, shards), control=self.control)  # type: ignore[arg-type]
        arguments: dict[str, Any] = {"length": len(samples), "batch_size": p.batch_size, "seed": p.seed}
        order: EpochOrder = choose_order(samples, stream, self.texts_per_image)(**arguments)
        return first_sight(samples, image_ids, order, self.updates(order))

    def updates(self, order: EpochOrder) -> Updates:
        """As `training.run.Plan` counts them."""
        p = self.params
        found = Updates(count=0, accumulate=p.accumulate, repeats=self.repeats)
        count = found.an_epoch(order.steps) * p.max_epochs
        count = min(count, p.max_steps) if p.max_steps else count
        return Updates(count=count, accumulate=p.accumulate, repeats=self.repeats)


def settings_of(run: str, provenance: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The run's own settings in a checkpoint's provenance; None where it does not say."""
    kind, name = split_start(run)
    found = provenance.get("params", {}).get(kind, {}).get(name)
    return found if isinstance(found, Mapping) else None
