"""Convert BERT's weights to TDEN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.convert.bert import BertSizes, ConvertedBert, convert_layout
from vlp_models.models.tden.config import TDENConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: TDENConfig) -> ConvertedBert:
    """Convert a BERT for the text side of a TDEN of its sizes: text embedding, sentence encoder, LM head.

    If the file has no LM head (a plain BertModel), TDEN's keeps its initialization.

    bert: its config.json.
    """
    sizes = BertSizes.of(
        config,
        layers_key="sentence_layers",
        stack="sentence_encoder",
        tied=config.tie_lm_head,
        eps=("layer_norm_eps", "embedding_norm_eps"),
    )
    return convert_layout(state, bert, sizes)
