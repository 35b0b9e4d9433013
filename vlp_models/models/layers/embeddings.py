"""Embeddings of words and regions, and sine positions of an image's grid.

Shape suffixes: B images, R regions, S regions and [IMG], F feature dimension, D hidden, M packed tokens; H and W cells
of a grid, P half of the hidden dimension.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Regions
from vlp_models.models.layers.packing import Packing


def embedding_table(embedding: nn.Module) -> Tensor:
    """Return all rows of an embedding, [V, D], for a tied output layer or single rows.

    Of a module that replaced it, such as peft's LoRA layer, these are the rows that the module returns, not the weights
    that it wraps.
    """
    weight = cast(Tensor, embedding.weight)
    if isinstance(embedding, nn.Embedding):
        return weight
    return cast(Tensor, embedding(torch.arange(len(weight), device=weight.device)))


class TextEmbedding(nn.Module):
    """Word + learned absolute position + type -> LayerNorm -> dropout, as in BERT."""

    def __init__(
        self, vocab_size: int, hidden: int, *, max_positions: int, types: int, dropout: float, eps: float
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_positions, hidden)
        self.types = nn.Embedding(types, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        """Embed int64 ids: padded, packed, or one token per hypothesis. types, positions: broadcastable to `ids`."""
        return self.dropout(self.norm(self.words(ids) + self.positions(positions) + self.types(types)))


class FeatureDropout(nn.Dropout1d):
    """Drops entries of the detector's features, [B, R, F], before they are projected.

    The same entries in all regions of an image: otherwise another region, or the mean of all, would reveal what was
    dropped. It is in none of the papers; it delays overfitting on a few thousand photos.
    """

    def forward(self, features_BRF: Tensor) -> Tensor:
        # (B, R, F) -> (B, F, R) and back, because Dropout1d drops whole rows of the second dimension.
        return super().forward(features_BRF.transpose(1, 2)).transpose(1, 2)


class RegionEmbedding(nn.Module):
    """Linear(feature) + Linear(location) -> LayerNorm -> dropout, with [IMG] in front.

    A location is x1, y1, x2, y2 as fractions of the image, and the area they enclose; [IMG] is the mean of the regions'
    features, at the location of the whole image. feature_dropout: see `FeatureDropout`.
    """

    def __init__(
        self,
        feature_dim: int,
        hidden: int,
        *,
        dropout: float,
        eps: float,
        separate_norms: bool = False,
        feature_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.features = nn.Linear(feature_dim, hidden)
        self.locations = nn.Linear(5, hidden)
        self.separate_norms = separate_norms
        if separate_norms:
            self.feature_norm = nn.LayerNorm(hidden, eps=eps)
            self.location_norm = nn.LayerNorm(hidden, eps=eps)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, regions: Regions, hidden_BR: Tensor | None = None) -> tuple[Tensor, Packing]:
        """Return the packed tokens, [M, D], and their packing in [B, S], with S = 1 + R and [IMG] first.

        hidden_BR bool: regions to hide. Their features become zero and are left out of [IMG]'s mean; their locations
        remain. An image without regions is [IMG] alone, with a zero feature.
        """
        features_BRF, mean_BF = _visible(regions, self.feature_dropout(regions.features_BRF), hidden_BR)
        # [IMG] is the mean of the visible regions, at the box of the whole image.
        image_box_B14 = regions.boxes_BR4.new_tensor([0.0, 0.0, 1.0, 1.0]).expand(len(regions), 1, 4)

        packing = Packing.of(torch.cat([torch.ones_like(regions.mask_BR[:, :1]), regions.mask_BR], dim=1))
        features_MF = packing.pack(torch.cat([mean_BF[:, None], features_BRF], dim=1))
        boxes_M4 = packing.pack(torch.cat([image_box_B14, regions.boxes_BR4], dim=1))
        x1, y1, x2, y2 = boxes_M4.unbind(-1)
        locations_M5 = torch.cat([boxes_M4, ((x2 - x1) * (y2 - y1))[:, None]], dim=-1)

        if self.separate_norms:
            # Scaled to -1 .. 1: as fractions, distant places differ in length more than in direction, and a norm
            # removes the length.
            locations = self.location_norm(self.locations(2 * locations_M5 - 1))
            x = self.feature_norm(self.features(features_MF)) + locations
        else:
            x = self.features(features_MF) + self.locations(locations_M5)
        return self.dropout(self.norm(x)), packing

    def mean_region(self, regions: Regions, hidden_BR: Tensor | None = None) -> Tensor:
        """Return the mean of the visible regions' features, [B, F], with a feature dropout of its own."""
        _, mean_BF = _visible(regions, regions.features_BRF, hidden_BR)
        return self.feature_dropout(mean_BF[:, None]).squeeze(1)


def _visible(regions: Regions, features_BRF: Tensor, hidden_BR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the features with zeros where a region is padding or hidden, and the mean of the other regions' [B, F]."""
    visible_BR = regions.mask_BR if hidden_BR is None else regions.mask_BR & ~hidden_BR
    features_BRF = features_BRF * visible_BR[..., None]
    return features_BRF, features_BRF.sum(1) / visible_BR.sum(1, keepdim=True).clamp(min=1)


def sine_positions(mask_BHW: Tensor, dimension: int) -> Tensor:
    """Return sine position encodings of a grid's cells, [B, H, W, D] float32.

    The first half encodes the row, the second the column, sines and cosines alternating. Rows and columns are counted
    from 1 and scaled so that the last valid one is 2 pi (DETR, Carion et al. 2020, appendix A.4, normalized as in its
    code). So the lower right corners of images of different sizes have the same encoding.

    mask_BHW bool: True inside the image. dimension: a multiple of 4.
    """
    valid_BHW = mask_BHW.float()
    # (B, H, W, P) for each axis, then both halves side by side.
    # A sine and a cosine share each period; periods grow geometrically from 1 towards 10,000.
    waves_P = torch.arange(dimension // 2, device=mask_BHW.device)
    period_P = 10000.0 ** (2 * (waves_P // 2) / (dimension // 2))
    halves = []
    for axis in (1, 2):
        count_BHW = valid_BHW.cumsum(axis)
        angle_BHW = count_BHW / (count_BHW.select(axis, -1).unsqueeze(axis) + 1e-6) * (2 * math.pi)
        angle_BHWP = angle_BHW[..., None] / period_P
        halves.append(torch.stack([angle_BHWP[..., 0::2].sin(), angle_BHWP[..., 1::2].cos()], -1).flatten(-2))
    return torch.cat(halves, -1)
