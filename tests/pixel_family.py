"""A family that reads pixels, as small as one can be: colours of patches beside words, through one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs, PixelInput
from vlp_models.models.protocols import Fused


@dataclass(frozen=True, kw_only=True)
class PatchesConfig:
    vocab_size: int
    hidden: int = 16
    side: int = 8
    augment: bool = False


class Patches(nn.Module):
    config_class: ClassVar[type] = PatchesConfig

    def __init__(self, config: PatchesConfig) -> None:
        super().__init__()
        self.config = config
        self.fused_dim = config.hidden
        self.patch = nn.Conv2d(3, config.hidden, 4, stride=4)
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.fusion = nn.Linear(2 * config.hidden, config.hidden)

    @property
    def inputs(self) -> ModelInputs:
        side, augment = self.config.side, ("random_resized_crop", "flip") if self.config.augment else ()
        return ModelInputs(image=PixelInput(height=side, width=side, augment=augment))

    def fuse(self, image: Image, text: Text) -> Fused:
        assert isinstance(image, Pixels)
        image_BRD = self.patch(image.pixels_B3HW).flatten(2).transpose(1, 2)
        text_BTD = self.word(text.ids_BT) * text.mask_BT[..., None]
        both_BD: Tensor = torch.cat([image_BRD.mean(1), text_BTD.mean(1)], dim=-1)
        return Fused(image_BRD=image_BRD, text_BTD=text_BTD, pooled_BP=self.fusion(both_BD).tanh())
