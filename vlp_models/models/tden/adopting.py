"""What a TDEN takes over of another TDEN's checkpoint: that of another stage, with other heads or longer tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlp_models.models.adopt import Adopted, adopt_weights, refuse_other

if TYPE_CHECKING:
    from vlp_models.models.tden.model import TDEN

# Weights trained with another value are of other shapes, or of the same shape and another meaning.
SAME = ("hidden", "heads", "intermediate", "feature_dim", "separate_region_norms", "separate_ffn")
TABLES = ("text_embedding.positions.weight",)  # a prefix of it means the same


def adopt(model: TDEN, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adopted:
    """
    Args:
        weights, config: the other's, without `model.` in front; config.json's `model_config`.

    Raises:
        CheckpointError: sizes differ that make the two incomparable, or nothing fits.
    """
    refuse_other(config, dataclasses.asdict(model.config), SAME)
    given = dict(weights)
    words, head = "text_embedding.words.weight", "word_head.weight"
    if not model.config.tie_lm_head and words in given:  # of a tied checkpoint, the head is the embedding
        given.setdefault(head, given[words])
    return adopt_weights(model, given, tables=TABLES)
