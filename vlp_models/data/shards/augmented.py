"""A train split's captions with more of the same images: what a captioner wrote, or the images' own once more."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vlp_models.data.sample import Sample
from vlp_models.data.shards.blocks import Layout
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A caption that a model wrote of an image."""

    caption_id: str
    image_id: str
    text: str


def read_written(directory: Path, shards: Path) -> list[Written]:
    """The captions in data/augmented/NAME.

    Raises:
        DataError: one is of an image of the val or the test split.
    """
    rows = read_table("captions", directory, ["caption_id", "image_id", "text"]).to_pylist()
    for split in ("val", "test"):
        held_out = ShardDataset(shards, split, "images", regions=False).references()
        refuse_held_out({row["image_id"] for row in rows} & held_out.keys(), f"{directory}: it has captions", split)
    return [Written(**row) for row in rows]


def refuse_held_out(image_ids: set[str], what: str, split: str) -> None:
    """
    Raises:
        DataError: there are such images.
    """
    if image_ids:
        raise DataError(
            f"{what} of {len(image_ids):,} images of the {split} split, such as {', '.join(sorted(image_ids)[:3])}: "
            "who learns from them has seen what it is judged by. Name other `sources`, or make the datasets' splits "
            "agree; then `dvc repro augment` writes them anew"
        )


class AugmentedDataset(Dataset[Sample]):
    """The samples of `base`, a view of captions, and behind them one for each written caption of an image it has.

    control: the text of such a sample is not the written one but a caption of the image in `base`; its first for the
    first, and so on in turn. As many samples of each image, so as many updates, and nothing that is new.
    """

    def __init__(self, base: ShardDataset, written: Sequence[Written], *, control: bool) -> None:
        """
        Raises:
            DataError: of no image of `base` anything was written.
        """
        places: dict[str, list[int]] = {}
        for place, image_id in enumerate(base.image_ids()):
            places.setdefault(image_id, []).append(place)
        self._base = base
        self._control = control
        self._more = [caption for caption in written if caption.image_id in places]
        if not self._more:
            raise DataError(
                "of no image of this run's `sources` a caption was written; look at `augment` in params.yaml"
            )
        turns: Counter[str] = Counter()
        self._own: list[int] = []  # the sample of `base` whose image, or in the control all, each of them takes
        for caption in self._more:
            own = places[caption.image_id]
            self._own.append(own[turns[caption.image_id] % len(own)])
            turns[caption.image_id] += 1

    def __len__(self) -> int:
        return len(self._base) + len(self._more)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        own = len(self._base)
        samples = self._base.__getitems__([i if i < own else self._own[i - own] for i in indices])
        return [s if i < own else self._written(s, self._more[i - own]) for i, s in zip(indices, samples, strict=True)]

    def image_ids(self) -> list[str]:
        """As `ShardDataset.image_ids`."""
        return [*self._base.image_ids(), *(caption.image_id for caption in self._more)]

    def samples_of(self, image_ids: Set[str]) -> NDArray[np.int64]:
        """As `ShardDataset.samples_of`."""
        behind = [i for i, caption in enumerate(self._more) if caption.image_id in image_ids]
        return np.concatenate([self._base.samples_of(image_ids), len(self._base) + np.array(behind, np.int64)])

    @property
    def layout(self) -> Layout | None:
        """Where the samples lie; None unless `base` is streamed."""
        return None if self._base.layout is None else Layout.of(self._places, self._base.layout.block_bytes)

    def _places(self) -> Iterator[NDArray[np.int64]]:
        of_base = np.concatenate(list(self._base.places()))
        yield np.concatenate([of_base, of_base[self._own]])

    def _written(self, sample: Sample, caption: Written) -> Sample:
        text = sample.text if self._control else caption.text
        return dataclasses.replace(sample, sample_id=caption.caption_id, text=text)
