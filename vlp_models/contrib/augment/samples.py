"""Samples with captions that a model wrote for training images, or as a control the images' own captions again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError


@dataclass(frozen=True, kw_only=True)
class GeneratedCaption:
    """A caption of an image that a model wrote."""

    caption_id: str
    image_id: str
    text: str


def read_generated(directory: Path, shards: Path) -> list[GeneratedCaption]:
    """Read the captions in data/augmented/NAME.

    Raises:
        DataError: one is of an image of the val or the test split.
    """
    rows = read_table("captions", directory, ["caption_id", "image_id", "text"]).to_pylist()
    for split in ("val", "test"):
        held_out = ShardDataset(shards, split, "images", regions=False).references()
        refuse_evaluation_images(
            {row["image_id"] for row in rows} & held_out.keys(), f"{directory}: it has captions", split
        )
    return [GeneratedCaption(**row) for row in rows]


def refuse_evaluation_images(image_ids: set[str], problem: str, split: str) -> None:
    """Check that `image_ids` is empty.

    Args:
        problem: start of the message, such as "data/augmented/NAME: it has captions".

    Raises:
        DataError: it is not.
    """
    if image_ids:
        raise DataError(
            f"{problem} of {len(image_ids):,} images of the {split} split, such as {', '.join(sorted(image_ids)[:3])}: "
            "training on them would leak evaluation data. Name other `sources`, or make the datasets' splits "
            "agree, and run `dvc repro augment`"
        )


def augment_samples(base: ShardDataset, directory: Path, shards: Path, *, control: bool) -> AugmentedDataset:
    """Return `base` with the captions in `directory`, data/augmented/NAME."""
    return AugmentedDataset(base, read_generated(directory, shards), control=control)


class AugmentedDataset(Dataset[Sample]):
    """The samples of `base`, a view of captions, followed by one per generated caption of its images.

    control: use a caption of the image in `base` in place of the generated one; the first for the first, and so on in
    turn. So the number of samples per image and of updates is the same, without new text.
    """

    def __init__(self, base: ShardDataset, written: Sequence[GeneratedCaption], *, control: bool) -> None:
        """Match generated captions with the images of `base`.

        Raises:
            DataError: no image of `base` has a generated caption.
        """
        # Only images with generated captions are kept in memory.
        base_samples: dict[str, list[int]] = {caption.image_id: [] for caption in written}
        for number, image_id in enumerate(base.iterate_image_ids()):
            if image_id in base_samples:
                base_samples[image_id].append(number)
        self._base = base
        self._control = control
        self._written = [caption for caption in written if base_samples[caption.image_id]]
        if not self._written:
            raise DataError("no image of this run's `sources` has a generated caption; check `augment` in params.yaml")
        # per generated caption the sample of `base` whose image (control: and text) it uses, in turn
        self._base_numbers: list[int] = []
        turns: Counter[str] = Counter()
        for caption in self._written:
            numbers = base_samples[caption.image_id]
            # More generated captions than samples of an image: start again with the first one.
            self._base_numbers.append(numbers[turns[caption.image_id] % len(numbers)])
            turns[caption.image_id] += 1

    def __len__(self) -> int:
        return len(self._base) + len(self._written)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        # samples of `base` come first, then those of generated captions
        length = len(self._base)
        samples = self._base.__getitems__([i if i < length else self._base_numbers[i - length] for i in indices])
        for position, index in enumerate(indices):
            if index >= length:
                caption, sample = self._written[index - length], samples[position]
                text = sample.text if self._control else caption.text
                samples[position] = dataclasses.replace(sample, sample_id=caption.caption_id, text=text)
        return samples

    def image_ids(self) -> list[str]:
        """Return the image id of each sample."""
        return [*self._base.image_ids(), *(caption.image_id for caption in self._written)]

    def first_positions(self) -> NDArray[np.uint32]:
        """Return uint32 [N]: for each sample the number of the first sample with its image."""
        base_positions = self._base.first_positions()
        return np.concatenate([base_positions, base_positions[self._base_numbers]])

    def find_samples(self, image_ids: Set[str]) -> NDArray[np.int64]:
        """Return the numbers of samples with one of these images."""
        written = [i for i, caption in enumerate(self._written) if caption.image_id in image_ids]
        return np.concatenate([self._base.find_samples(image_ids), len(self._base) + np.array(written, np.int64)])

    @property
    def layout(self) -> Any:
        """Return where the samples are; None unless `base` is streamed."""
        layout = self._base.layout
        return None if layout is None else layout.of(self._image_spans, layout.block_bytes)

    def _image_spans(self) -> Iterator[NDArray[np.int64]]:
        base_spans = np.concatenate(list(self._base.image_spans()))  # int64 [N, 3]
        yield np.concatenate([base_spans, base_spans[self._base_numbers]])
