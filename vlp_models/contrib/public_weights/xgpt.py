"""Convert BERT's weights to XGPT. The text model that the paper starts from is not public; XGPT has no public code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.contrib.public_weights.bert import BertSizes, ConvertedBert, convert_layout
from vlp_models.models.xgpt.config import XGPTConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: XGPTConfig) -> ConvertedBert:
    """Convert a BERT for an XGPT of its sizes (the paper's has fewer heads). `structure: enc_dec`: for its encoder.

    XGPT has no token types: BERT's type 0, which every word of a sentence has, is added to the positions. Nor has it
    BERT's LM head.

    bert: its config.json.
    """
    sizes = BertSizes.of(config, stack="layers", head=False, eps=("layer_norm_eps", "embedding_norm_eps"))
    converted = convert_layout(state, bert, sizes)
    weights = dict(converted.weights)
    types = weights.pop("text_embedding.types.weight")
    weights["text_embedding.positions.weight"] = weights["text_embedding.positions.weight"] + types[0]
    left_out = [*converted.left_out, "embeddings.token_type_embeddings.weight[1:]"]
    return dataclasses.replace(converted, weights=weights, left_out=sorted(left_out))
