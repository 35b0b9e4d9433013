"""BERT's weights as XGPT's stack: for the text model that the paper begins with, which is not public."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, Converted, convert
from vlp_models.models.xgpt.config import XGPTConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: XGPTConfig) -> Converted:
    """For an XGPT of BERT's sizes, whose heads the paper has fewer of. `structure: enc_dec`: for its encoder.

    XGPT has no token types: BERT's first one, which every word of a sentence has, becomes part of each position. Nor
    has it BERT's LM head.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    sizes = BertSizes.of(config, stack="layers", head=False, eps=("layer_norm_eps", "embedding_norm_eps"))
    converted = convert(state, bert, sizes)
    weights = dict(converted.weights)
    types = weights.pop("text_embedding.types.weight")
    weights["text_embedding.positions.weight"] = weights["text_embedding.positions.weight"] + types[0]
    left_out = [*converted.left_out, "embeddings.token_type_embeddings.weight[1:]"]
    return dataclasses.replace(converted, weights=weights, left_out=sorted(left_out))
