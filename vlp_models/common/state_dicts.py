"""Weights of other programs as a state dict: read as hostile, and nothing in the file is run."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vlp_models.errors import CheckpointError

MAX_BYTES = 16 * 2**30
WRAPPERS = ("model", "state_dict", "module")  # where programs put weights
SHOWN = 20  # names in a message
WAY_OUT = "name a file that has the model's state_dict(), as .safetensors or written by torch.save"
_CODE = re.compile(r"GLOBAL (\S+)")  # in torch's words: what a pickle asks for
_COUNTER = "num_batches_tracked"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file that holds nothing which could run code.

    Wrapped in `model`, `state_dict` or `module` or not, with DistributedDataParallel's `module.` before names or not.

    Raises:
        CheckpointError: can't be read, too large, damaged, not only tensors and plain values, or no state dict.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    _check_size(path, size)
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else _load_torch(path)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # torch's readers let anything out on bytes that are no weights
        raise CheckpointError(f"{path}: {_what_is_wrong(head, error)}") from None
    for wrapper in WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(_is_dense(value) for value in state.values()):
        raise CheckpointError(f"{path}: not a state dict (names and dense tensors); {WAY_OUT}")
    # A view may claim any shape over a few stored bytes; copying it would then fill the memory.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if claimed > 2 * size + 2**20:
        raise CheckpointError(f"{path}: claims tensors of {claimed:,} bytes in a file of {size:,}")
    if all(str(name).startswith("module.") for name in state):
        return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    return {str(name): tensor for name, tensor in state.items()}


def _load_torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):  # torch's own zips are stored; a compressed one could unpack to anything
        with zipfile.ZipFile(path) as archive:
            _check_size(path, sum(member.file_size for member in archive.infolist()))
    return torch.load(path, map_location="cpu", weights_only=True)


def _what_is_wrong(head: bytes, error: Exception) -> str:
    """And the way out. torch's own, to load without `weights_only`, is not passed on.

    Args:
        head: the first bytes of the file.
    """
    if not head:
        return f"an empty file, no weights; {WAY_OUT}"
    text = str(error)
    asked = _CODE.search(text) if isinstance(error, pickle.UnpicklingError) else None
    if asked:
        return (
            f"holds more than tensors and plain values ({asked[1]}), so it is not loaded; where you trust it, save its "
            "state dict as .safetensors"
        )
    said = text.rpartition("WeightsUnpickler error:")[2].strip().split("\n")[0]
    return (
        f"damaged or no weights file (begins with {head!r}; {type(error).__name__}: {said:.200}); fetch it anew, or "
        f"{WAY_OUT}"
    )


def _is_dense(value: object) -> bool:
    """A tensor whose numbers are in the file, one for each place."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_nested)


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise CheckpointError(f"{path}: {size >> 30} GiB; the limit is {MAX_BYTES >> 30}")


def load_strict(model: nn.Module, state: Mapping[str, Tensor], where: object, said_by: str) -> None:
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
        lines = [f"  {len(keys)} {what}: {shorten_list(keys)}" for what, keys in problems.items() if keys]
        raise CheckpointError(f"{where}: weights of another architecture than {said_by} says:\n" + "\n".join(lines))
    model.load_state_dict(state)


def shorten_list(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first of them, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
