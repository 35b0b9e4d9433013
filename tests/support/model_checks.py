"""Load a written checkpoint as a model, list the protocols that a model implements, and encode one text."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import protocols
from vlp_models.models.checkpoint import (
    CheckpointInfo,
    build_from_config,
    load_checkpoint_weights,
    part_of,
    read_config,
    read_weights,
)


def load_model(directory: Path) -> tuple[nn.Module, Tokenizer, CheckpointInfo]:
    """Return the model (without a task's head), its tokenizer and config.json.

    Raises:
        CheckpointError: damaged, or of another architecture.
    """
    info = read_config(directory)
    tokenizer = Tokenizer.load(directory)
    model = build_from_config(info, tokenizer, directory)
    load_checkpoint_weights(model, part_of(read_weights(directory), "model"), directory)
    return model, tokenizer, info


PROTOCOLS: dict[str, type] = {
    name: protocol
    for name, protocol in vars(protocols).items()
    if getattr(protocol, "_is_protocol", False) and name != "Protocol"
}


def protocols_of(model: nn.Module) -> set[str]:
    """Return the names of the protocols that a model implements."""
    return {name for name, protocol in PROTOCOLS.items() if isinstance(model, protocol)}


def encode(tokenizer: Tokenizer, text: str, max_len: int) -> list[int]:
    """Return the ids of one text: [CLS] w1 ... wn [SEP]."""
    return [int(i) for i in tokenizer.encode_batch([text], max_len).ids_BT[0]]
