"""Adapt the weights of another VLMo to another image size, text length or second image type.

Relative position biases of another resolution are interpolated as in BEiT's code: the old offsets are placed at
distances that grow geometrically, so that near offsets keep their place and the farthest ones reach the end of the new
range; a cubic spline through them is evaluated at the new, even offsets. Absolute position embeddings are interpolated
bicubically on the even grid, as in ViT's code. The biases to and from [CLS] are kept. Interpolation changes what the
model computes, so it happens only with `interpolate_positions`.

Shape suffixes: H heads of all layers, O offsets, S image tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.vlmo.config import VLMoConfig

IMAGE, TEXT = "position_bias.image", "position_bias.text"
ABSOLUTE = "image_embedding.positions_SD"
FIRST_TYPE, SECOND_TYPE = "image_embedding.type_1D", "image_embedding.second_type_1D"


def fit_weights(
    model_config: VLMoConfig, weights: Mapping[str, Tensor], weights_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the weights of a VLMo with `weights_config` in the shapes of a VLMo with `model_config`.

    Raises:
        CheckpointError: another resolution without `interpolate_positions`.
    """
    # Patches along an image's side
    before, now = weights_config["side"] // weights_config["patch"], model_config.grid
    fitted = dict(weights)
    if before != now:
        if not model_config.interpolate_positions:
            side = weights_config["side"]
            raise CheckpointError(
                f"the weights have positions for images of {side} pixels, the model for {model_config.side}; set "
                f"`side: {side}`, or `interpolate_positions: true` to interpolate them"
            )
        if IMAGE in fitted:
            fitted[IMAGE] = interpolate_biases(fitted[IMAGE], before, now)
        if ABSOLUTE in fitted:
            fitted[ABSOLUTE] = interpolate_embeddings(fitted[ABSOLUTE], before, now)
    if TEXT in fitted:
        fitted[TEXT] = resize_text_biases(fitted[TEXT], model_config.max_positions)
    if model_config.second_image_type and FIRST_TYPE in fitted:
        # The second image's type embedding starts as a copy of the first one's, as in the authors' code.
        fitted.setdefault(SECOND_TYPE, fitted[FIRST_TYPE])
    return fitted


def interpolate_biases(table_HO: Tensor, before: int, now: int) -> Tensor:
    """Interpolate `PositionBias.image` from a grid of `before` patches a side to a grid of `now`."""
    old, new = 2 * before - 1, 2 * now - 1
    # The new, even offsets -(now - 1) .. now - 1
    even = np.arange(new, dtype=np.float64) - (now - 1)
    to_new = torch.from_numpy(spline_matrix(geometric_offsets(before - 1, now - 1), even))
    # Offsets are pairs (vertical, horizontal): the same matrix applies to both axes. [H, old, old] -> [H, new, new]
    offsets = table_HO[:, : old * old].double().view(-1, old, old)
    offsets = to_new @ offsets @ to_new.T
    # The last three columns are the biases to and from [CLS].
    return torch.cat([offsets.flatten(1).to(table_HO.dtype), table_HO[:, old * old :]], 1)


def spline_matrix(knots: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the matrix that maps values at `knots` (ascending) to values at `points`: [len(points), len(knots)].

    It evaluates the interpolating cubic spline (a piecewise linear one for fewer than four knots); beyond the ends the
    values are constant."""
    from scipy.interpolate import make_interp_spline

    # Splines through the unit vectors: column i is the spline that is 1 at knot i and 0 at the others.
    spline = make_interp_spline(knots, np.eye(len(knots)), k=3 if len(knots) >= 4 else 1)
    matrix: NDArray[np.float64] = spline(np.clip(points, knots[0], knots[-1]))
    return matrix


def geometric_offsets(before: int, now: int) -> NDArray[np.float64]:
    """Return the positions of the offsets -before .. before: 0, 1, 1 + q, 1 + q + q^2 ..., and mirrored.

    q, between 1.01 and 1.5, is found by bisection (to 1e-6) so that the last position is `now`."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        # The last position is the geometric sum 1 + q + ... + q ** (before - 1).
        if (1 - q**before) / (1 - q) > now:
            high = q
        else:
            low = q
    steps = np.cumsum(q ** np.arange(before))
    return np.concatenate([-steps[::-1], [0.0], steps])


def interpolate_embeddings(table_SD: Tensor, before: int, now: int) -> Tensor:
    """Interpolate absolute position embeddings, [CLS] first: [S, D] for a grid of `before` to one of `now`."""
    # (S, D) without [CLS] -> (1, D, before, before)
    grid = table_SD[1:].T.reshape(1, -1, before, before)
    resized = F.interpolate(grid.float(), size=(now, now), mode="bicubic", align_corners=False)
    return torch.cat([table_SD[:1], resized.flatten(2)[0].T.to(table_SD.dtype)])


def resize_text_biases(table_HO: Tensor, max_text_len: int) -> Tensor:
    """Resize `PositionBias.text` for longer or shorter texts: known offsets keep their bias, new ones get zero."""
    offsets, special = table_HO[:, :-3], table_HO[:, -3:]
    # The table has 2 * max_text_len - 3 offsets, zero in the middle: pad (or crop, if negative) both ends alike.
    more = (2 * max_text_len - 3 - offsets.shape[1]) // 2
    return torch.cat([F.pad(offsets, (more, more)), special], 1)
