"""Inputs of the transformer (section 3.1): patch embeddings of images, word embeddings of texts.

`stem` may put a CNN before the patch projection, for models that train on few images. Neither variant is the paper's or
its code's. A CNN detects a shape at any position from the start; projected patches must learn that from many images.

- `stem: convolutions`: a small CNN's feature map is projected, as in T. Xiao et al., "Early Convolutions Help
  Transformers See Better", arXiv 2106.14881.
- `stem: timm`: the feature map of one of timm's CNNs, for which pretrained weights exist, as in the hybrid architecture
  of ViT (A. Dosovitskiy et al.: "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR
  2021, arXiv 2010.11929, section 3.1).

Shape suffixes: B images, S image tokens ([CLS] and N patches), C channels, h/w cells of a feature map, M packed words,
D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Pixels
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.packing import Packing
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.vision.pretrained_weights import check_model, data_config
from vlp_models.vision.small_backbone import STRIDE, SmallBackbone

KEYS = ("stem_backbone", "stem_stage")


class PatchEmbedding(nn.Module):
    """[CLS] and a linear projection of each patch, plus the image type (and positions, if these are absolute)."""

    def __init__(self, config: VLMoConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.side = config.side
        self.stem: nn.Module = nn.Identity()
        channels, patch = 3, config.patch  # of the projection's input; patch in cells of the stem's map
        if config.stem == "convolutions":
            first, second, channels = config.stem_channels
            self.stem, patch = SmallBackbone((first, second, channels)), patch // STRIDE
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
        # Replaces a hidden patch in masked image modeling.
        self.hidden_1D = nn.Parameter(torch.zeros(1, hidden)) if config.image_codes else None

    def forward(self, image: Pixels, hidden_BN: Tensor | None = None) -> Tensor:
        """Embed images: [B, 3, H, W] -> [B, S, D]. hidden_BN bool: patches to replace by a learned vector.

        Raises:
            DataError: pixels of another size than `side`.
        """
        pixels = image.pixels_B3HW
        if pixels.shape[1:] != (3, self.side, self.side):
            raise DataError(
                f"images of {tuple(pixels.shape[1:])}; the model's `side` requires 3x{self.side}x{self.side}"
            )
        if hidden_BN is not None and self.overlapping:
            # A CNN's cells overlap: blank the hidden patches' pixels, so that neighbors contain nothing of them.
            # [B, N] -> [B, 1, rows, columns] -> [B, 1, H, W]
            hidden_B1hw = hidden_BN.unflatten(1, (self.side // self.patch, -1))[:, None].to(pixels.dtype)
            pixels = pixels * (1 - F.interpolate(hidden_B1hw, scale_factor=float(self.patch), mode="nearest"))
        x_BND = self.embed_patches(pixels)
        if hidden_BN is not None:
            x_BND = torch.where(hidden_BN[..., None], self.hidden_1D.to(x_BND.dtype), x_BND)  # type: ignore[union-attr]
        x_BSD = torch.cat([self.cls_1D.to(x_BND.dtype).expand(len(x_BND), 1, -1), x_BND], 1)
        type_1D: Tensor = self.type_1D
        if self.second_type_1D is not None and image.place_B is not None:
            # [B, 1, D]: the second image of a sample (NLVR2) has its own type.
            type_1D = torch.where(image.place_B[:, None, None] == 0, self.type_1D, self.second_type_1D)
        return x_BSD + (type_1D if self.positions_SD is None else type_1D + self.positions_SD)

    def embed_patches(self, pixels_B3HW: Tensor) -> Tensor:
        """Return the projected patches, [B, N, D], without type and positions.

        Raises:
            ParamsError: the CNN's map has other cells than its stride promises.
        """
        # While frozen in training, the stem needs no graph. Outside training, callers may ask for gradients.
        frozen = self.training and not self.stem.training
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            map_BChw = self.stem(pixels_B3HW)
        x_BDhw = self.patches(map_BChw)
        # A CNN may round its map's size differently than its stride promises.
        side, cells = self.side // self.patch, tuple(x_BDhw.shape[2:])
        if cells != (side, side):
            raise ParamsError(f"config: the stem gives {cells} patches for {self.side} pixels, not {side} a side")
        return x_BDhw.flatten(2).transpose(1, 2)


class CNNStem(nn.Module):
    """One of timm's CNNs before the patch projection. stride: pixels per cell of its map; channels: of a cell.

    VLMo's pixels are normalized with mean 0.5 and standard deviation 0.5; the CNN's weights may expect others. Its
    convolutions pad with zeros, so the difference cannot be folded into the first convolution, as it can for a ViT's
    patches (convert/vlmo_images.py). Scale and shift are saved with the weights, because another version of timm may
    have other values for the same name.
    """

    def __init__(self, name: str, stage: int, patch: int) -> None:
        """
        Args:
            name, stage: see `Backbone`.
            patch: pixels of a patch's side, a multiple of the stride.

        Raises:
            ParamsError: timm has no such model or feature map, or the patch is not a multiple of a cell.
        """
        super().__init__()
        from vlp_models.models.layers.backbone import Backbone  # imports timm, which takes seconds

        check_model(name, f"config: {KEYS[0]}")
        self.backbone = Backbone(name, stage, {}, KEYS)
        self.stride, self.channels = self.backbone.stride, self.backbone.channels
        if patch % self.stride:
            raise ParamsError(
                f"config: patch ({patch}) must be a multiple of {self.stride}, the stride of `stem_backbone: {name}`; "
                "an earlier stem_stage has a smaller stride"
            )
        normalization = data_config(name)
        scale_3, shift_3 = renormalization(normalization["mean"], normalization["std"])
        self.register_buffer("scale_3", scale_3)
        self.register_buffer("shift_3", shift_3)

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, h, w]"""
        scale_3, shift_3 = self.get_buffer("scale_3"), self.get_buffer("shift_3")
        return self.backbone(pixels_B3HW * scale_3[:, None, None] + shift_3[:, None, None])


def renormalization(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return scale and shift per channel that turn pixels normalized with 0.5 and 0.5 into ones with `mean`, `std`."""
    means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    return (HALF / stds).float(), ((HALF - means) / stds).float()


class WordEmbedding(nn.Module):
    """Words (plus positions, if these are absolute) -> LayerNorm -> dropout, plus the text type."""

    def __init__(self, config: VLMoConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.positions == "absolute" else None
        self.norm = nn.LayerNorm(config.hidden, eps=config.embedding_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.type_1D = nn.Parameter(torch.zeros(1, config.hidden))

    def forward(self, ids_BT: Tensor, words: Packing) -> Tensor:
        """Embed the real tokens of padded texts: [B, T] -> [M, D]."""
        x_MD = self.words(words.pack(ids_BT))
        if self.positions is not None:
            x_MD = x_MD + self.positions(words.positions_M)
        return self.dropout(self.norm(x_MD)) + self.type_1D
