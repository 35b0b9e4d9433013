"""What an XGPT takes over of another XGPT's checkpoint: with a longer table, another refiner, another decoder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlp_models.models.adopt import Adopted, adopt_weights, refuse_other

if TYPE_CHECKING:
    from vlp_models.models.xgpt.model import XGPT

# Weights trained with another value are of other shapes, or of the same shape and another meaning.
SAME = ("hidden", "heads", "intermediate", "feature_dim", "separate_region_norms", "refiner_gate", "refiner_norm")
# Setting -> where its tensors are, whose meaning another value changes and whose shapes it may not: they are left out.
MEANINGS = {"signal": re.compile(r"\.signal$"), "tifg_target": re.compile(r"^region_head\.")}
TABLES = ("text_embedding.positions.weight",)  # a prefix of it means the same


def adopt(model: XGPT, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adopted:
    """
    Args:
        weights, config: the other's, without `model.` in front; config.json's `model_config`.

    Raises:
        CheckpointError: sizes differ that make the two incomparable, or nothing fits.
    """
    own = dataclasses.asdict(model.config)
    refuse_other(config, own, SAME)
    other = [named for key, named in MEANINGS.items() if config.get(key, own[key]) != own[key]]
    left_out = [name for name in weights if any(named.search(name) for named in other)]
    adopted = adopt_weights(model, {n: t for n, t in weights.items() if n not in left_out}, tables=TABLES)
    return dataclasses.replace(adopted, left_out=sorted([*adopted.left_out, *left_out]))
