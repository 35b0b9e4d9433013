"""Captions that a model writes of training images, and their use: `augment`, and `augment` of a fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vlp_models.params.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class AugmentParams:
    """Which captions are written (the stage `augment`).

    start     the captioner: finetune/RUN of the task captioning
    sources   datasets whose training images it describes; empty: all
    captions  of an image, at most; fewer where fewer different ones are drawn
    samples   of an image; of those that are new, the likeliest `captions` by token are kept
    top_p     each token comes from the likeliest ones that have this share of the probability together
    """

    start: str
    sources: list[str] = field(default_factory=list)
    captions: PositiveInt = 2
    samples: PositiveInt = 5
    temperature: PositiveFloat = 1.0
    top_p: Share = 0.9
    max_caption_len: PositiveInt = 24  # tokens, [SEP] included
    batch_size: PositiveInt = 64
    seed: NonNegativeInt = 1

    def __post_init__(self) -> None:
        if self.samples < self.captions:
            raise ValueError(f"`samples: {self.samples}` must be at least `captions: {self.captions}`")
        if not self.top_p:
            raise ValueError("`top_p` must be above 0")


@dataclass(frozen=True, kw_only=True)
class AugmentedParams:
    """What a fine-tuning learns from besides; `augment: NAME` stands for `augment: {captions: NAME}`.

    captions  of an entry of `augment`; empty: of none
    control   in the place of every written caption, one of the same image's own once more: as many samples and updates,
              and no new text
    """

    captions: str = ""
    control: bool = False

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        return {"captions": value}
