"""Unified VLP's class-aware region embedding: a region's appearance, its location and its detected class.

Equation 1: W_r R + W_p [LayerNorm(W_c C) | LayerNorm(W_g G)], "the bias term and the nonlinearity term are omitted".
Here they are where the authors' code has them: W_r is the detector's last layer, which is trained as well, and a
projection, each with a ReLU; W_p also ends in a ReLU. W_c and W_g, whose sizes the paper leaves open, are as wide as
the model. G is x1, y1, x2, y2 and area as fractions, scaled to -1 .. 1: as fractions, distant places differ in length
more than in direction, and a norm removes the length.

`compat` does what the authors' code does: no W_c and W_g, norms without weights; x as fractions of the largest x of the
image's regions and y of the largest y ("lazy normalization"), the area in these units, and the detector's confidence as
a sixth number. The image's sides cancel, so fractions of them serve as well as pixels.

Shape suffixes: B images, R regions, F feature dimension, C classes, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Regions, ScoredRegions
from vlp_models.errors import DataError
from vlp_models.models.layers.embeddings import FeatureDropout


class RegionEmbedding(nn.Module):
    """Embeds regions, [B, R, D], without the segment embedding and the norm over the sum, which all tokens share."""

    def __init__(
        self,
        feature_dim: int,
        classes: int,
        hidden: int,
        *,
        dropout: float,
        eps: float,
        compat: bool,
        feature_dropout: float = 0.0,
    ) -> None:
        """classes: 0 for an embedding without class probabilities. feature_dropout: see `FeatureDropout`."""
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.compat = compat
        # W_r of equation 1: the detector's last layer and a projection.
        self.features = nn.Sequential(
            nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, hidden), nn.ReLU()
        )
        if compat:
            inputs = 6 + classes  # numbers of `compat_geometry`, and class probabilities
        else:
            inputs = 2 * hidden if classes else hidden  # W_c C and W_g G side by side
        self.places = nn.Linear(inputs, hidden)
        self.of_classes: nn.Module | None = None
        if not compat:
            self.of_geometry = nn.Sequential(nn.Linear(5, hidden), nn.LayerNorm(hidden, eps=eps))
            if classes:
                self.of_classes = nn.Sequential(nn.Linear(classes, hidden), nn.LayerNorm(hidden, eps=eps))
        self.dropout = nn.Dropout(dropout)

    def forward(self, regions: Regions, hidden_BR: Tensor | None = None) -> Tensor:
        """hidden_BR bool: regions to hide. Their features become zero, their locations and classes remain."""
        features_BRF = self.feature_dropout(regions.features_BRF)
        if hidden_BR is not None:
            features_BRF = features_BRF * ~hidden_BR[..., None]
        if self.compat:
            parts = [layer_norm(compat_geometry(regions)), layer_norm(regions.class_probs_BRC)]
        else:
            parts = [self.of_geometry(2 * geometry(regions) - 1)]  # fractions, scaled to -1 .. 1
            if self.of_classes is not None:
                parts.insert(0, self.of_classes(regions.class_probs_BRC))
        # Equation 1: W_p of both parts side by side, (B, R, inputs) -> (B, R, D), and its ReLU.
        places = F.relu(self.places(torch.cat(parts, -1)))
        return self.dropout(self.features(features_BRF)) + self.dropout(places)


def layer_norm(x: Tensor) -> Tensor:
    """Apply a layer norm without weights."""
    return F.layer_norm(x, x.shape[-1:])


def geometry(regions: Regions) -> Tensor:
    """Return x1, y1, x2, y2 and area as fractions of the image. [B, R, 5]"""
    x1, y1, x2, y2 = regions.boxes_BR4.unbind(-1)
    return torch.cat([regions.boxes_BR4, ((x2 - x1) * (y2 - y1))[..., None]], -1)


def compat_geometry(regions: Regions) -> Tensor:
    """Return x1, y1, x2, y2, area and confidence, in units of the largest x and y of the image's regions. [B, R, 6]

    Raises:
        DataError: the regions have no confidence.
    """
    if not isinstance(regions, ScoredRegions):
        raise DataError("compat_reference reads the detector's confidence: pass `ScoredRegions`")
    corners_BR22 = regions.boxes_BR4.unflatten(-1, (2, 2))  # both corners' x and y
    corners_BR22 = corners_BR22.masked_fill(~regions.mask_BR[..., None, None], 0.0)
    largest_B12 = corners_BR22.amax((1, 2))[:, None]
    if regions.place_BR is not None:  # of several images, each has its own largest x and y: [B, R, 2]
        same_BRR = regions.place_BR[:, :, None] == regions.place_BR[:, None]
        # (B, 1, R, 2) * (B, R, R, 1) -> (B, R, 2): the largest among the regions of the same image.
        largest_B12 = (corners_BR22.amax(2)[:, None] * same_BRR[..., None]).amax(2)
    # Avoids a division by zero without regions or with blank ones; the authors' code adds as much, in pixels.
    boxes_BR4 = (corners_BR22 / largest_B12.clamp(min=1e-5)[:, :, None]).flatten(2)
    x1, y1, x2, y2 = boxes_BR4.unbind(-1)
    area_BR = ((x2 - x1) * (y2 - y1)).clamp(min=0)
    return torch.cat([boxes_BR4, area_BR[..., None], regions.scores_BR[..., None].to(boxes_BR4.dtype)], -1)
