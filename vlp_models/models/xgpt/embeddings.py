"""How words and regions enter the model (section 3 of the paper).

Shape suffixes: B images, R regions, M packed tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Regions
from vlp_models.models.layers.embeddings import FeatureDropout
from vlp_models.models.layers.packing import Packing


class TextEmbedding(nn.Module):
    """Token + learned absolute position -> LayerNorm -> dropout."""

    def __init__(self, vocab_size: int, hidden: int, *, max_positions: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_positions, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """int64 both, of one shape: packed, or one token of each hypothesis."""
        return self.place(self.words(ids), positions)

    def place(self, content: Tensor, positions: Tensor) -> Tensor:
        """The same with other content than words."""
        return self.dropout(self.norm(content + self.positions(positions)))


class RegionEmbedding(nn.Module):
    """Linear over a region's feature and its location side by side -> LayerNorm.

    A location is x1, y1, x2, y2 as fractions of the image and the area they enclose. separate_norms: what becomes of
    the two is normalised before it is added, the location counted from -1 to 1. feature_dropout: see `FeatureDropout`.
    """

    def __init__(
        self, feature_dim: int, hidden: int, *, eps: float, separate_norms: bool, feature_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.features = nn.Linear(feature_dim, hidden)  # with `locations` the one matrix of [feature, location]
        self.locations = nn.Linear(5, hidden, bias=separate_norms)
        self.feature_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.location_norm = nn.LayerNorm(hidden, eps=eps) if separate_norms else None
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, regions: Regions, *, drop: bool = True) -> tuple[Tensor, Packing]:
        """The packed regions, [M, D], and where they stand in [B, R]; no dropout but that of features, and not that
        unless `drop`. An image without regions has one that is all zero: attention needs something to look at."""
        mask_BR = regions.mask_BR.clone()
        mask_BR[:, 0] |= ~mask_BR.any(1)
        packing = Packing.of(mask_BR)
        seen_BR1 = regions.mask_BR[..., None]
        boxes_M4 = packing.pack(regions.boxes_BR4 * seen_BR1)
        x1, y1, x2, y2 = boxes_M4.unbind(-1)
        locations_M5 = torch.cat([boxes_M4, ((x2 - x1) * (y2 - y1))[:, None]], dim=-1)
        features_BRF = self.feature_dropout(regions.features_BRF) if drop else regions.features_BRF
        features_MD = self.features(packing.pack(features_BRF * seen_BR1))
        if self.feature_norm is None or self.location_norm is None:
            return self.norm(features_MD + self.locations(locations_M5)), packing
        locations_MD = self.location_norm(self.locations(2 * locations_M5 - 1))
        return self.norm(self.feature_norm(features_MD) + locations_MD), packing
