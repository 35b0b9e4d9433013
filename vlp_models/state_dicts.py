"""Weights of other programs as a state dict: read as hostile, and nothing in the file is run."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vlp_models.errors import CheckpointError

MAX_BYTES = 16 * 2**30
WRAPPERS = ("model", "state_dict", "module")  # where programs put weights
SHOWN = 20  # names in a message
_COUNTER = "num_batches_tracked"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file that holds nothing which could run code.

    Wrapped in `model`, `state_dict` or `module` or not, with DistributedDataParallel's `module.` before names or not.

    Raises:
        CheckpointError: no such file, too large, damaged, not only tensors and plain values, or no state dict.
    """
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path}: no such file") from None
    _check_size(path, size)
    state: Any
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            if zipfile.is_zipfile(path):  # torch's own zips are stored; a compressed one could unpack to anything
                with zipfile.ZipFile(path) as archive:
                    _check_size(path, sum(member.file_size for member in archive.infolist()))
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values, so it is not loaded ({str(error).splitlines()[0]}); "
            "where you trust it, save its state dict as .safetensors"
        ) from None
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: damaged or no weights file: {str(error).splitlines()[0]}") from None
    for wrapper in WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{path}: not a state dict (names and tensors); save the model's state_dict()")
    # A view may claim any shape over a few stored bytes; copying it would then fill the memory.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if claimed > 2 * size + 2**20:
        raise CheckpointError(f"{path}: claims tensors of {claimed:,} bytes in a file of {size:,}")
    if all(str(name).startswith("module.") for name in state):
        return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    return {str(name): tensor for name, tensor in state.items()}


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise CheckpointError(f"{path}: {size >> 30} GiB; the limit is {MAX_BYTES >> 30}")


def load_exactly(model: nn.Module, state: Mapping[str, Tensor], where: object, said_by: str) -> None:
    """Strict loading, with all that does not fit in one message.

    Args:
        where: the weights are, for the message.
        said_by: what says the architecture, e.g. `detector.backbone`.

    Raises:
        CheckpointError: listing missing and unexpected keys and wrong shapes.
    """
    own = model.state_dict()
    # Batch norm's counters play no part in eval mode, and older published weights lack them.
    counters = {name: tensor for name, tensor in own.items() if name.endswith(_COUNTER)}
    state = counters | {name: tensor for name, tensor in state.items() if name in own or not name.endswith(_COUNTER)}
    problems = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{name} {list(state[name].shape)} for {list(own[name].shape)}"
            for name in sorted(own.keys() & state.keys())
            if own[name].shape != state[name].shape
        ],
    }
    if any(problems.values()):
        lines = [f"  {len(keys)} {what}: {some(keys)}" for what, keys in problems.items() if keys]
        raise CheckpointError(f"{where}: weights of another architecture than {said_by} says:\n" + "\n".join(lines))
    model.load_state_dict(state)


def some(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first of them, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
