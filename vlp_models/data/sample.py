"""One sample as read from the shards, before batching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

REGION_DTYPES: dict[str, type[np.floating[Any]]] = {
    "features": np.float16,
    "boxes": np.float32,
    "class_probs": np.float16,
    "scores": np.float32,
}


@dataclass(frozen=True, kw_only=True)
class RegionArrays:
    """The regions of one image: a detector's, most confident first; imported ones in the order of their file.

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
    """One image of a sample: regions or pixels if requested; `seed` as in a sample."""

    image_id: str
    regions: RegionArrays | None = None
    pixels: bytes | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a view.

    image_id  its image; empty if the view has none
    text      the view's text; empty if it has none
    values    other columns of the view (data/views), by name: `sample["answers"]`. Lists are tuples; a null list is
              empty, any other null is None
    regions, pixels  of the image, if requested; pixels are the encoded PNG or JPEG file
    others    images after the first, in order, if the row has several
    seed      of the sample's random augmentation (shards/order.py); None: no randomness
    """

    sample_id: str
    image_id: str
    source: str
    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    regions: RegionArrays | None = None
    pixels: bytes | None = None
    others: tuple[SampleImage, ...] = ()
    seed: int | None = None

    @property
    def image_ids(self) -> tuple[str, ...]:
        """Return the ids of all its images."""
        return (self.image_id, *(other.image_id for other in self.others))

    @property
    def images(self) -> tuple[SampleImage, ...]:
        """Return all its images, each with a seed of its own; the first has the sample's."""
        images = [SampleImage(image_id=self.image_id, regions=self.regions, pixels=self.pixels, seed=self.seed)]
        for number, image in enumerate(self.others, start=1):
            seed = None
            if self.seed is not None:
                # each image is augmented differently, as a function of the sample's seed
                seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0])
            images.append(replace(image, seed=seed))
        return tuple(images)

    def without_images(self) -> Sample:
        """Return the sample without image contents; image ids are kept."""
        images = tuple(SampleImage(image_id=image.image_id) for image in self.others)
        return replace(self, regions=None, pixels=None, others=images)

    def __getitem__(self, column: str) -> Any:
        return self.values[column]
