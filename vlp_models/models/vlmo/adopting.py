"""Weights of another VLMo: of other depth or heads for objectives, another resolution, another length of texts.

What an image's relative position biases mean at another resolution is interpolated as in BEiT: the old offsets are laid
out at distances that grow geometrically, so that near ones stay where they are and the farthest come to lie where the
new ones end, and a cubic spline through them is read at the new, even offsets (BEiT's code; ViT's for absolute ones:
bicubic on the even grid). The biases to and from [CLS] stay as they are. It changes what the model computes, so it is
done only where `interpolate_positions` asks for it.

Shape suffixes: H heads of all layers, O offsets before, P offsets after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.adopt import Adopted, adopt_weights, refuse_other

if TYPE_CHECKING:
    from vlp_models.models.vlmo.model import VLMo

ARCHITECTURE = ("hidden", "heads", "intermediate", "patch", "stem", "positions", "feed_forward")
CNN_STEM = ("stem_backbone", "stem_stage")  # with `stem: timm`; else they say nothing
IMAGE, TEXT = "position_bias.image", "position_bias.text"
ABSOLUTE = "image_embedding.positions_SD"
FIRST_TYPE, SECOND_TYPE = "image_embedding.type_1D", "image_embedding.second_type_1D"


def adopt(model: VLMo, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adopted:
    """
    Raises:
        CheckpointError: of another architecture; of another resolution without `interpolate_positions`.
    """
    keys = ARCHITECTURE + (CNN_STEM if model.config.stem == "timm" else ())
    refuse_other(config, dataclasses.asdict(model.config), keys)
    before, now = config["side"] // config["patch"], model.config.grid
    fitted = dict(weights)
    if before != now:
        if not model.config.interpolate_positions:
            raise CheckpointError(
                f"the weights' positions are those of images of {config['side']} pixels, not {model.config.side}; set "
                f"`side: {config['side']}`, or `interpolate_positions: true` to have them interpolated"
            )
        if IMAGE in fitted:
            fitted[IMAGE] = interpolate_biases(fitted[IMAGE], before, now)
        if ABSOLUTE in fitted:
            fitted[ABSOLUTE] = interpolate_embeddings(fitted[ABSOLUTE], before, now)
    if TEXT in fitted:
        fitted[TEXT] = resize_text_biases(fitted[TEXT], model.config.max_positions)
    if model.config.second_image_type and FIRST_TYPE in fitted:
        fitted.setdefault(SECOND_TYPE, fitted[FIRST_TYPE])  # as there: it begins as the first image's
    return adopt_weights(model, fitted, tables=("text_embedding.positions.weight",))


def interpolate_biases(table_HO: Tensor, before: int, now: int) -> Tensor:
    """`PositionBias.image` of a grid of `now` patches a side from that of one of `before`."""
    old, new = 2 * before - 1, 2 * now - 1
    places = geometric_offsets(before - 1, now - 1)
    to_new = torch.from_numpy(spline_matrix(places, np.arange(new, dtype=np.float64) - (now - 1)))
    offsets = table_HO[:, : old * old].double().view(-1, old, old)
    offsets = to_new @ offsets @ to_new.T
    return torch.cat([offsets.flatten(1).to(table_HO.dtype), table_HO[:, old * old :]], 1)


def spline_matrix(places: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """[len(wanted), len(places)]: times the values at `places`, which rise, it gives those at `wanted`, by the
    interpolating cubic spline (straight lines through fewer than four). Beyond the ends it stays what it is there."""
    from scipy.interpolate import make_interp_spline

    spline = make_interp_spline(places, np.eye(len(places)), k=3 if len(places) >= 4 else 1)
    found: NDArray[np.float64] = spline(np.clip(wanted, places[0], places[-1]))
    return found


def geometric_offsets(before: int, now: int) -> NDArray[np.float64]:
    """Where the offsets -before .. before come to lie: at 0, 1, 1 + q, 1 + q + q^2 ..., and mirrored. q, between 1.01
    and 1.5, is such that the last lies at `now`, found to a millionth."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        if (1 - q**before) / (1 - q) > now:
            high = q
        else:
            low = q
    steps = np.cumsum(q ** np.arange(before))
    return np.concatenate([-steps[::-1], [0.0], steps])


def interpolate_embeddings(table_SD: Tensor, before: int, now: int) -> Tensor:
    """Absolute positions, [CLS] first."""
    grid = table_SD[1:].T.reshape(1, -1, before, before)
    resized = F.interpolate(grid.float(), size=(now, now), mode="bicubic", align_corners=False)
    return torch.cat([table_SD[:1], resized.flatten(2)[0].T.to(table_SD.dtype)])


def resize_text_biases(table_HO: Tensor, max_text_len: int) -> Tensor:
    """`PositionBias.text` of longer or shorter texts: offsets keep their meaning, unknown ones are zero."""
    offsets, special = table_HO[:, :-3], table_HO[:, -3:]
    more = (2 * max_text_len - 3 - offsets.shape[1]) // 2
    return torch.cat([F.pad(offsets, (more, more)), special], 1)
