"""The batches of a run: shards of the train split to learn from, a part of the val split to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

import numpy as np
from torch.utils.data import Subset

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.shards.augmented import AugmentedDataset, Written
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.order import order_of
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import StreamParams

MAX_VALIDATION_SAMPLES = 1000


def _evenly(length: int) -> list[int]:
    """Numbers evenly over the split, so that every dataset in it is seen."""
    return list(np.linspace(0, max(0, length - 1), min(length, MAX_VALIDATION_SAMPLES)).astype(int).tolist())


def validates_on(shards: Path, view: str, sources: Mapping[str, int], captioned: bool, image_ids: Set[str]) -> bool:
    """Whether a training's validations have one of these images; from the index alone."""
    val = ShardDataset(shards, "val", view, sources, regions=False, captioned=captioned)
    return bool(np.isin(_evenly(len(val)), val.samples_of(image_ids)).any())


class LoaderFactory:
    """(rank, world size) -> loaders. `train` and `val`: the samples of an epoch, and those validated on."""

    def __init__(
        self,
        shards: Path,
        view: str,
        *,
        sources: Mapping[str, int],
        collate: Callable[[list[Sample]], Batch],
        batch_size: int,
        num_workers: int,
        seed: int,
        captioned: bool = False,
        written: Sequence[Written] = (),
        control: bool = False,
        regions: bool = True,
        pixels: bool = False,
        stream: StreamParams | None = None,
        texts_per_image: int = 1,
    ) -> None:
        """
        Args:
            regions, pixels: what of the images is read (`InputReader.flags`).
            captioned: of the view `images`, those with a reference caption only.
            stream: where the images are read, and how; without an address, one by one in `shards`.
            texts_per_image: at most so many texts about one image are put beside each other (data/grouped_order.py).
            written, control: what the train split's captions are augmented by (data/augmented.py).

        Raises:
            DataError: the shards are damaged, or hold nothing to learn from.
            ParamsError: `sources` names a dataset the shards do not hold, or `texts_per_image` comes with a stream.
        """
        flags = {"captioned": captioned, "regions": regions, "pixels": pixels}
        train = ShardDataset(shards, "train", view, sources, **flags, stream=stream)
        if not len(train):
            raise DataError(f"{shards}: the train split has no {view}; check `data` and `sources` in params.yaml")
        self.train = AugmentedDataset(train, written, control=control) if written else train
        val = ShardDataset(shards, "val", view, sources, **flags, stream=stream, by_block=False)
        self.val = Subset(val, _evenly(len(val)))
        self._order = order_of(self.train, stream, texts_per_image)
        self._collate = collate
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._seed = seed

    def __call__(self, rank: int, world_size: int) -> tuple[ResumableLoader, ResumableLoader | None]:
        """
        Raises:
            ParamsError: a batch can't be shared out evenly.
        """
        if self._batch_size % world_size:
            nearest = max(1, round(self._batch_size / world_size)) * world_size
            raise ParamsError(
                f"params.yaml: `batch_size: {self._batch_size}` is that of all processes together, and {world_size} of "
                f"them (`trainer.devices` times `trainer.num_nodes`) can't share it evenly; {nearest} would do"
            )
        train = ResumableLoader(
            self.train,
            batch_size=self._batch_size,
            collate=self._collate,
            seed=self._seed,
            shuffle=True,
            num_workers=self._num_workers,
            rank=rank,
            world_size=world_size,
            draws=True,
            make_order=self._order,
        )
        if not len(self.val):
            return train, None
        val = ResumableLoader(
            self.val,
            batch_size=self._batch_size,
            collate=self._collate,
            seed=self._seed,
            shuffle=False,
            rank=rank,
            world_size=world_size,
        )
        return train, val
