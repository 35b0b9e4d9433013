"""Load a written checkpoint as a model, and list the protocols that a model implements."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import protocols
from vlp_models.models.checkpoint import (
    CheckpointInfo,
    build_from_config,
    load_strictly,
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
    load_strictly(model, part_of(read_weights(directory), "model"), directory)
    return model, tokenizer, info


PROTOCOLS: dict[str, type] = {
    name: protocol
    for name, protocol in vars(protocols).items()
    if getattr(protocol, "_is_protocol", False) and name != "Protocol"
}


def protocols_of(model: nn.Module) -> set[str]:
    """Return the names of the protocols that a model implements."""
    return {name for name, protocol in PROTOCOLS.items() if isinstance(model, protocol)}
