"""One sample as it leaves the shards, before any batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RegionArrays:
    """The detected regions of one image, most confident first.

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
class Sample:
    """What one row of a view holds; fields that another view fills are empty.

    | view       | text      | filled besides                                         |
    |------------|-----------|--------------------------------------------------------|
    | captions   | caption   |                                                        |
    | questions  | question  | answers (ten; () if hidden), question_type, answer_type |
    | statements | statement | label (None if hidden), group                          |
    | choices    | question  | answers, rationales (four each), answer_label, rationale_label |
    |            |           | (None if hidden), boxes                                |
    | images     | ""        | captions: every reference of the image                 |
    """

    sample_id: str
    image_id: str
    source: str
    text: str = ""
    regions: RegionArrays | None = None
    pixels: bytes | None = None  # the encoded PNG or JPEG file
    captions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    question_type: str = ""
    answer_type: str = ""
    label: bool | None = None
    group: str = ""
    rationales: tuple[str, ...] = ()
    answer_label: int | None = None
    rationale_label: int | None = None
    draw: int | None = None  # seed of what chance decides for this sample now; None: nothing is left to chance
    boxes: tuple[tuple[float, ...], ...] = ()  # of the image's objects: x1, y1, x2, y2 as fractions
