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
    sizes = BertSizes(
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        heads=config.heads,
        intermediate=config.intermediate,
        layers=config.layers,
        max_positions=config.max_positions,
        stack="transformer",
        head=not config.plain_heads,
    )
    return convert(state, bert, sizes)
