"""BERT's words as VLMo's: their embeddings and the LM head.

VLMo's blocks normalise before each sub-layer, BERT's after it, so that BERT's blocks are of no use to it; its language
experts learn from texts alone (section 3.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, Converted, convert
from vlp_models.models.vlmo.config import VLMoConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: VLMoConfig) -> Converted:
    """For a VLMo as wide as BERT. BERT's first token type, which every word of a sentence has, becomes part of each
    word; its positions find a place in a model with `positions: absolute`.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    absolute = config.positions == "absolute"
    positions = config.max_positions if absolute else 0
    sizes = BertSizes.of(config, layers=0, max_positions=positions, tied=False, eps=("embedding_norm_eps",))
    converted = convert(state, bert, sizes)
    weights, left_out = dict(converted.weights), [*converted.left_out, "embeddings.token_type_embeddings.weight[1:]"]
    types = weights.pop("text_embedding.types.weight")
    weights["text_embedding.words.weight"] = weights["text_embedding.words.weight"] + types[0]
    if not absolute:
        del weights["text_embedding.positions.weight"]
        left_out.append("embeddings.position_embeddings.weight")
    return dataclasses.replace(converted, weights=weights, left_out=sorted(left_out))
