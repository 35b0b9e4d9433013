"""BERT's weights as SOHO's words, transformer and LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, Converted, convert
from vlp_models.models.soho.config import SOHOConfig


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: SOHOConfig) -> Converted:
    """For a SOHO of BERT's sizes; the paper's small models have the first three of its twelve layers.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    return convert(state, bert, BertSizes.of(config, stack="transformer", head=not config.plain_heads))
