"""What an XGPT takes over of another XGPT's checkpoint: with a longer table, another refiner, another decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlp_models.models.adopt import Adopted, adopt_weights, refuse_other

if TYPE_CHECKING:
    from vlp_models.models.xgpt.model import XGPT

# Weights trained with another value are of other shapes, or of the same shape and another meaning.
SAME = ("hidden", "heads", "intermediate", "feature_dim", "separate_region_norms", "refiner_gate", "refiner_norm")
TABLES = ("text_embedding.positions.weight",)  # a prefix of it means the same


def adopt(model: XGPT, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adopted:
    """
    Args:
        weights, config: the other's, without `model.` in front; config.json's `model_config`.

    Raises:
        CheckpointError: sizes differ that make the two incomparable, or nothing fits.
    """
    refuse_other(config, dataclasses.asdict(model.config), SAME)
    return adopt_weights(model, weights, tables=TABLES)
