"""What a Unified VLP takes over of another one's checkpoint: that of another stage, or of more positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlp_models.models.adopt import Adopted, adopt_weights, refuse_other

if TYPE_CHECKING:
    from vlp_models.models.unified_vlp.model import UnifiedVLP

# Weights trained with another value are of other shapes, or of the same shape and another meaning.
SAME = ("hidden", "heads", "intermediate", "feature_dim", "region_slots", "region_classes", "compat_reference")
TABLES = ("text_embedding.positions.weight",)  # a prefix of it means the same


def adopt(model: UnifiedVLP, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adopted:
    """
    Args:
        weights, config: the other's, without `model.` in front; config.json's `model_config`.

    Raises:
        CheckpointError: sizes differ that make the two incomparable, or nothing fits.
    """
    refuse_other(config, dataclasses.asdict(model.config), SAME)
    return adopt_weights(model, weights, tables=TABLES)
