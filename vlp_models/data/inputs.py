"""What a model reads, said by the model: everything that prepares its input follows from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RegionInput:
    """Region features that a detector (or another source) made beforehand."""


@dataclass(frozen=True, kw_only=True)
class PixelInput:
    """Images as pixels, decoded when a batch is made.

    height, width  in pixels, after resizing
    resize         squash: both sides to their length. crop: the shorter side to its length, then the centre.
                   pad: the longer side fits, the rest is masked
    mean, std      of each channel, for values from 0 to 1
    augment        while training, as a function of (seed, epoch, sample): random_resized_crop and/or flip
    """

    height: int
    width: int
    resize: Literal["squash", "crop", "pad"] = "squash"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    augment: tuple[Literal["random_resized_crop", "flip"], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """image: None for a model of texts alone. text: False for a model of images alone.

    whole_words: texts come with `Text.word_BT`, which of the sentence's words a token is a piece of.
    """

    image: RegionInput | PixelInput | None
    text: bool = True
    whole_words: bool = False
