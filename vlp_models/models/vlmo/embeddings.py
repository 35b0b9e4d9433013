"""What enters the transformer (section 3.1): patches of an image, words of a text.

Shape suffixes: B images, S image tokens ([CLS] and N patches), M packed words, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Pixels
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.backbone import Backbone
from vlp_models.models.layers.packing import Packing
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.vision.pretrained_weights import check_model, data_config
from vlp_models.vision.small_backbone import STRIDE, SmallBackbone


class PatchEmbedding(nn.Module):
    """[CLS] and a linear projection of each patch, plus the image type (and positions, where these are absolute).

    `stem: convolutions`: what is projected is a small CNN's map of the patch, as in T. Xiao et al., "Early Convolutions
    Help Transformers See Better", arXiv 2106.14881. A CNN knows a shape wherever it lies; projected patches have to
    learn that from many pictures. `stem: timm`: the map is of one of timm's CNNs (cnn_stem.py). Neither is the paper's.
    """

    def __init__(self, config: VLMoConfig) -> None:
        """
        Raises:
            ParamsError: see `CNNStem`.
        """
        super().__init__()
        hidden = config.hidden
        self.side = config.side
        self.stem: nn.Module = nn.Identity()
        channels, patch = 3, config.patch
        if config.stem == "convolutions":
            one, two, channels = config.stem_channels
            self.stem, patch = SmallBackbone((one, two, channels)), patch // STRIDE
        elif config.stem == "timm":
            cnn = CNNStem(config.stem_backbone, config.stem_stage, patch)
            self.stem, patch, channels = cnn, patch // cnn.stride, cnn.channels
        self.patch, self.overlapping = config.patch, config.stem != "linear"
        self.patches = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.cls_1D = nn.Parameter(torch.zeros(1, hidden))
        self.type_1D = nn.Parameter(torch.zeros(1, hidden))
        self.second_type_1D = nn.Parameter(torch.zeros(1, hidden)) if config.second_image_type else None
        self.positions_SD = None
        if config.positions == "absolute":
            self.positions_SD = nn.Parameter(torch.zeros(1 + config.grid**2, hidden))
        self.hidden_1D = (
            nn.Parameter(torch.zeros(1, hidden)) if config.image_codes else None
        )  # in a hidden patch's place

    def forward(self, image: Pixels, hidden_BN: Tensor | None = None) -> Tensor:
        """[B, S, D]. hidden_BN bool: patches whose place a learnt vector takes.

        Raises:
            DataError: pixels of another size than `side`.
        """
        pixels = image.pixels_B3HW
        if pixels.shape[1:] != (3, self.side, self.side):
            raise DataError(
                f"images of {tuple(pixels.shape[1:])}; the model's `side` asks for 3x{self.side}x{self.side}"
            )
        if hidden_BN is not None and self.overlapping:  # or the patches around a hidden one would see parts of it
            pixels = pixels * (1 - self._pixels_of(hidden_BN, pixels))
        x_BND = self.look(pixels)
        if hidden_BN is not None:
            x_BND = torch.where(hidden_BN[..., None], self.hidden_1D.to(x_BND.dtype), x_BND)  # type: ignore[union-attr]
        x_BSD = torch.cat([self.cls_1D.to(x_BND.dtype).expand(len(x_BND), 1, -1), x_BND], 1)
        kind: Tensor = self.type_1D
        if self.second_type_1D is not None and image.place_B is not None:
            kind = torch.where(image.place_B[:, None, None] == 0, self.type_1D, self.second_type_1D)  # [B, 1, D]
        return x_BSD + (kind if self.positions_SD is None else kind + self.positions_SD)

    def look(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, N, D]: the patches, before anything is added.

        Raises:
            ParamsError: a CNN whose map has other cells than its stride says.
        """
        # Frozen for now, the stem needs no gradient; without training, whoever asks for one gets it.
        frozen = self.training and not self.stem.training
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            map_BChw = self.stem(pixels_B3HW)
        x_BDhw = self.patches(map_BChw)
        side, cells = self.side // self.patch, tuple(x_BDhw.shape[2:])
        if cells != (side, side):
            raise ParamsError(f"config: of {self.side} pixels the stem makes {cells} patches, not {side} a side")
        return x_BDhw.flatten(2).transpose(1, 2)

    def _pixels_of(self, hidden_BN: Tensor, like: Tensor) -> Tensor:
        """[B, 1, H, W]: 1 on pixels of hidden patches."""
        grid = hidden_BN.unflatten(1, (self.side // self.patch, -1))[:, None].to(like.dtype)
        return F.interpolate(grid, scale_factor=float(self.patch), mode="nearest")


class WordEmbedding(nn.Module):
    """Words (plus positions, where these are absolute) -> LayerNorm -> dropout, plus the text type."""

    def __init__(self, config: VLMoConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.positions == "absolute" else None
        self.norm = nn.LayerNorm(config.hidden, eps=config.embedding_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.type_1D = nn.Parameter(torch.zeros(1, config.hidden))

    def forward(self, ids_BT: Tensor, words: Packing) -> Tensor:
        """[M, D]"""
        x_MD = self.words(words.pack(ids_BT))
        if self.positions is not None:
            x_MD = x_MD + self.positions(words.positions_M)
        return self.dropout(self.norm(x_MD)) + self.type_1D


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
