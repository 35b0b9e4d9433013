"""BERT's, or UniLM's, weights as Unified VLP's stack (tables 4 and 5: "init from")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, Converted, convert
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: UnifiedVLPConfig) -> Converted:
    """For a Unified VLP of BERT's sizes: its text embedding, stack and LM head. What sees images stays fresh.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    converted = convert(state, bert, BertSizes.of(config, types=(2, 6), stack="stack", eps=("layer_norm_eps",)))
    types = four_segments(converted.weights["text_embedding.types.weight"])
    return dataclasses.replace(converted, weights={**converted.weights, "text_embedding.types.weight": types})


def four_segments(types: Tensor) -> Tensor:
    """Image and sentence of the bidirectional objective, then of seq2seq. BERT's two serve both; of the six that UniLM
    and the public code have, rows 2 and 3 are of no use to them either."""
    return types[[0, 1, 0, 1] if len(types) == 2 else [0, 1, 4, 5]].clone()
