"""A CNN of timm's before the patches: what is projected is its map of them, as in the hybrid architecture of ViT.

A. Dosovitskiy et al.: "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021, arXiv
2010.11929, section 3.1. It is not VLMo's paper's, whose patches are projected linearly. A CNN that a million labelled
images taught sees from the start, where patches have to learn it from more photographs than are often at hand.

VLMo reads pixels with mean 0.5 and deviation 0.5. The CNN gets them as its weights want them. Its convolutions pad with
zeros, so that this can't go into the first of them, as it does into a ViT's patches (timm_vit.py). It is kept with the
weights instead: another timm may tell otherwise of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlp_models.errors import ParamsError
from vlp_models.models.layers.backbone import Backbone
from vlp_models.models.vlmo.config import HALF
from vlp_models.vision.weights import check_model, data_config

KEYS = ("stem_backbone", "stem_stage")


class CNNStem(nn.Module):
    """stride: pixels to a cell of its map; channels: of a cell."""

    def __init__(self, name: str, stage: int, patch: int) -> None:
        """
        Args:
            name, stage: see `Backbone`.
            patch: pixels of a patch's side, which holds whole cells.

        Raises:
            ParamsError: see `check_model` and `Backbone`; or a patch that is no multiple of a cell.
        """
        super().__init__()
        check_model(name, f"config: {KEYS[0]}")
        self.backbone = Backbone(name, stage, {}, KEYS)
        self.stride, self.channels = self.backbone.stride, self.backbone.channels
        if patch % self.stride:
            raise ParamsError(
                f"config: patch ({patch}) must be a multiple of {self.stride}, the pixels of a cell of `stem_backbone: "
                f"{name}`; an earlier stem_stage has smaller ones"
            )
        told = data_config(name)
        scale_3, shift_3 = renormalising(told["mean"], told["std"])
        self.register_buffer("scale_3", scale_3)
        self.register_buffer("shift_3", shift_3)

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, C, h, w]"""
        scale_3, shift_3 = self.get_buffer("scale_3"), self.get_buffer("shift_3")
        return self.backbone(pixels_B3HW * scale_3[:, None, None] + shift_3[:, None, None])


def renormalising(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """What pixels normalised with 0.5 and 0.5 are multiplied with, and what is then added, channel by channel, to have
    them normalised with `mean` and `std`."""
    means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    return (HALF / stds).float(), ((HALF - means) / stds).float()
