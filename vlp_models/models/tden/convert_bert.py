"""BERT's weights as TDEN's text side: text embedding, sentence encoder, LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, Converted, convert
from vlp_models.models.tden.config import TDENConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: TDENConfig) -> Converted:
    """For a TDEN of BERT's sizes. A file without the LM head (a plain BertModel) leaves ours out.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    sizes = BertSizes.of(
        config,
        layers_key="sentence_layers",
        stack="sentence_encoder",
        tied=config.tie_lm_head,
        eps=("layer_norm_eps", "embedding_norm_eps"),
    )
    return convert(state, bert, sizes)
