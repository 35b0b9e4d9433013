"""Unified VLP's class-aware region embedding: what a region looks like, where it is, and what the detector calls it.

Equation 1: W_r R + W_p [LayerNorm(W_c C) | LayerNorm(W_g G)], "the bias term and the nonlinearity term are omitted".
Here they are where the public code has them: W_r is the detector's last layer, which is trained along, and a
projection, each with a ReLU; W_p ends in one as well. W_c and W_g, whose sizes the paper leaves open, are as wide as
the model. G is x1, y1, x2, y2 and area as fractions, scaled to -1 .. 1: with fractions, near and far places differ in
length more than in direction, and a norm takes the length away.

`compat`, what the public code does instead: neither W_c nor W_g, norms without weights; x as fractions of the largest x
of any region of the image and y of the largest y ("lazy normalisation"), the area in these units, and the detector's
confidence as a sixth number. So the image's sides cancel, and fractions of them serve as well as pixels.

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
    """[B, R, D], without segment embedding and the norm over the sum, which tokens of all kinds share."""

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
        """classes: 0 for an embedding that knows of none. feature_dropout: see `FeatureDropout`."""
        super().__init__()
        self.feature_dropout = FeatureDropout(feature_dropout)
        self.compat = compat
        self.features = nn.Sequential(
            nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, hidden), nn.ReLU()
        )
        self.places = nn.Linear(6 + classes if compat else (2 if classes else 1) * hidden, hidden)
        self.of_classes: nn.Module | None = None
        if not compat:
            self.of_geometry = nn.Sequential(nn.Linear(5, hidden), nn.LayerNorm(hidden, eps=eps))
            if classes:
                self.of_classes = nn.Sequential(nn.Linear(classes, hidden), nn.LayerNorm(hidden, eps=eps))
        self.dropout = nn.Dropout(dropout)

    def forward(self, regions: Regions, hidden_BR: Tensor | None = None) -> Tensor:
        """hidden_BR bool: regions whose look is hidden; their features become zero, their places remain."""
        features_BRF = self.feature_dropout(regions.features_BRF)
        if hidden_BR is not None:
            features_BRF = features_BRF * ~hidden_BR[..., None]
        if self.compat:
            classes_BRC = regions.class_probs_BRC
            known = [normalised(geometry_of_public_code(regions)), normalised(classes_BRC)]
        else:
            known = [self.of_geometry(2 * geometry(regions) - 1)]
            if self.of_classes is not None:
                known.insert(0, self.of_classes(regions.class_probs_BRC))
        places = F.relu(self.places(torch.cat(known, -1)))
        return self.dropout(self.features(features_BRF)) + self.dropout(places)


def normalised(x: Tensor) -> Tensor:
    """A layer norm without weights."""
    return F.layer_norm(x, x.shape[-1:])


def geometry(regions: Regions) -> Tensor:
    """x1, y1, x2, y2 and area, as fractions of the image. [B, R, 5]"""
    x1, y1, x2, y2 = regions.boxes_BR4.unbind(-1)
    return torch.cat([regions.boxes_BR4, ((x2 - x1) * (y2 - y1))[..., None]], -1)


def geometry_of_public_code(regions: Regions) -> Tensor:
    """x1, y1, x2, y2, area and confidence, in units of the largest x and y of the image's regions. [B, R, 6]

    Raises:
        DataError: the regions came without the detector's confidence.
    """
    if not isinstance(regions, ScoredRegions):
        raise DataError("compat_reference reads the detector's confidence: give it `ScoredRegions`")
    corners_BR22 = regions.boxes_BR4.unflatten(-1, (2, 2))  # both corners' x and y
    largest_B2 = corners_BR22.masked_fill(~regions.mask_BR[..., None, None], 0.0).amax((1, 2))
    # Where there is no region, or a blank one, nothing is divided by zero. The public code adds as much, in pixels.
    boxes_BR4 = (corners_BR22 / largest_B2.clamp(min=1e-5)[:, None, None]).flatten(2)
    x1, y1, x2, y2 = boxes_BR4.unbind(-1)
    area_BR = ((x2 - x1) * (y2 - y1)).clamp(min=0)
    return torch.cat([boxes_BR4, area_BR[..., None], regions.scores_BR[..., None].to(boxes_BR4.dtype)], -1)
