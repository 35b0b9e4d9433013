"""BERT's, or UniLM's, weights as Unified VLP's stack (tables 4 and 5: "init from")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp_models.models.bert import BertSizes, convert
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig


def sizes_of(config: UnifiedVLPConfig) -> BertSizes:
    return BertSizes(
        vocab_size=config.vocab_size,
        hidden=config.hidden,
        heads=config.heads,
        intermediate=config.intermediate,
        layers=config.layers,
        max_positions=config.max_positions,
        types=(2, 6),
        stack="stack",
        layers_key="layers",
    )


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: UnifiedVLPConfig) -> dict[str, Tensor]:
    """For a Unified VLP of BERT's sizes: its text embedding, stack and LM head. What sees images stays fresh.

    bert: its config.json.

    Raises:
        CheckpointError: see `convert`.
    """
    weights = convert(state, bert, sizes_of(config))
    weights["text_embedding.types.weight"] = four_segments(weights["text_embedding.types.weight"])
    return weights


def four_segments(types: Tensor) -> Tensor:
    """Image and sentence of the bidirectional objective, then of seq2seq. BERT's two serve both; of the six that UniLM
    and the public code have, rows 2 and 3 are of no use to them either."""
    return types[[0, 1, 0, 1] if len(types) == 2 else [0, 1, 4, 5]].clone()
