"""One sample as it leaves the shards, before any batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RegionArrays:
    """The regions of one image: a detector's most confident first, imported ones in their file's order.

    features     float16 [N, F]
    boxes        float32 [N, 4]; x1, y1, x2, y2 as fractions of the image's width and height
    class_probs  float16 [N, C]; column 0 is background
    scores       float32 [N]
    """

    features: NDArray[np.float16]
    boxes: NDArray[np.float32]
    class_probs: NDArray[np.float16]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return int(self.features.shape[0])


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """One image of a sample: regions or pixels as they were asked for, `draw` as a sample's."""

    image_id: str
    regions: RegionArrays | None = None
    pixels: bytes | None = None
    draw: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a view.

    image_id  the image it speaks of; empty where the view has none
    text      the view's text; empty where it has none
    values    its other columns (data/views.py), by name: `sample["answers"]`. Lists are tuples; a null list is an empty
              one, any other null is None
    regions, pixels  of the image, where they were asked for; pixels are the encoded PNG or JPEG file
    others    the images behind the first, in order, of a row that speaks of several
    draw      seed of what chance decides for this sample now (data/loader.py); None: nothing is left to chance
    """

    sample_id: str
    image_id: str
    source: str
    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    regions: RegionArrays | None = None
    pixels: bytes | None = None
    others: tuple[SampleImage, ...] = ()
    draw: int | None = None

    @property
    def image_ids(self) -> tuple[str, ...]:
        """Of every image it speaks of."""
        return (self.image_id, *(other.image_id for other in self.others))

    @property
    def images(self) -> tuple[SampleImage, ...]:
        """Every image it speaks of, each with a draw of its own; the first has the sample's."""
        first = SampleImage(image_id=self.image_id, regions=self.regions, pixels=self.pixels, draw=self.draw)
        others = (replace(o, draw=_draw_of(self.draw, number)) for number, o in enumerate(self.others, start=1))
        return (first, *others)

    def without_images(self) -> Sample:
        """The same without what was read of its images; their ids stay."""
        others = tuple(SampleImage(image_id=other.image_id) for other in self.others)
        return replace(self, regions=None, pixels=None, others=others)

    def __getitem__(self, column: str) -> Any:
        return self.values[column]

    def having(self, **values: Any) -> Sample:
        """The same with other values of its columns."""
        return replace(self, values={**self.values, **values})


def _draw_of(draw: int | None, number: int) -> int | None:
    """What chance decides for image `number` of a sample follows from the sample's draw."""
    return None if draw is None else int(np.random.SeedSequence([draw, number]).generate_state(1, np.uint64)[0])
