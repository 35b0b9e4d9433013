"""Convert BERT's weights to Unified VLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.convert.bert import BertSizes, ConvertedBert, convert_layout
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: UnifiedVLPConfig) -> ConvertedBert:
    """Convert a BERT or UniLM for a Unified VLP of its sizes (tables 4 and 5 of the paper: "init from").

    It fills the text embedding, the stack and the LM head; the image's part keeps its initialization.

    bert: its config.json.
    """
    sizes = BertSizes.of(config, types=(2, 6), stack="stack", eps=("layer_norm_eps",))
    converted = convert_layout(state, bert, sizes)
    types = select_segments(converted.weights["text_embedding.types.weight"])
    return dataclasses.replace(converted, weights={**converted.weights, "text_embedding.types.weight": types})


def select_segments(types: Tensor) -> Tensor:
    """Return the four segments, [4, D]: image and sentence of the bidirectional objective, then of seq2seq.

    BERT's two types serve both. UniLM and the authors' code have six; their rows 2 and 3 are unused there as well.
    """
    return types[[0, 1, 0, 1] if len(types) == 2 else [0, 1, 4, 5]].clone()
