"""Read the weights of other programs as a state dict. Files are untrusted: nothing in them is executed."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vlp_models.errors import CheckpointError, explain_system_error, shorten_list

MAX_BYTES = 16 * 2**30
WRAPPERS = ("model", "state_dict", "module")  # keys under which programs store weights
HINT = "name a file with the model's state_dict(), as .safetensors or written by torch.save"
_CODE = re.compile(r"GLOBAL (\S+)")  # how torch's message names what a pickle would import
_COUNTER = "num_batches_tracked"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of a torch file that holds only tensors and plain values.

    The state dict may be nested under `model`, `state_dict` or `module`; DistributedDataParallel's prefix `module.` is
    removed.

    Raises:
        CheckpointError: the file is unreadable, too large, damaged, holds code, or is not a state dict.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(explain_system_error(error)) from None
    # Before loading: both loaders allocate what the file declares.
    _check_size(path, size)
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else _load_torch(path)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # torch raises any type for a file that is not weights
        raise CheckpointError(f"{path}: {_explain(head, error)}") from None
    # Programs nest the weights: {"model": {...}}, or {"state_dict": {...}, "optimizer": ...}.
    for wrapper in WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(_is_dense(value) for value in state.values()):
        raise CheckpointError(f"{path}: not a state dict (names and dense tensors); {HINT}")
    # A view may have any shape over a few stored bytes; copying it would fill the memory.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    # Tied weights are stored once and count twice in `claimed`; the megabyte is for tiny files.
    if claimed > 2 * size + 2**20:
        raise CheckpointError(f"{path}: declares {claimed:,} bytes of tensors in a {size:,}-byte file")
    if all(str(name).startswith("module.") for name in state):
        return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    return {str(name): tensor for name, tensor in state.items()}


def _load_torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):  # torch stores its zips uncompressed; a compressed one could unpack to any size
        with zipfile.ZipFile(path) as archive:
            _check_size(path, sum(member.file_size for member in archive.infolist()))
    return torch.load(path, map_location="cpu", weights_only=True)


def _explain(head: bytes, error: Exception) -> str:
    """Return what is wrong with a file that starts with `head`, and what to do.

    torch's own advice, to load it without `weights_only`, is not repeated.
    """
    if not head:
        return f"the file is empty; {HINT}"
    text = str(error)
    code = _CODE.search(text) if isinstance(error, pickle.UnpicklingError) else None
    if code:
        return (
            f"holds more than tensors and plain values ({code[1]}), so it is not loaded; if you trust it, save its "
            "state dict as .safetensors"
        )
    # torch's message starts with advice; the cause follows this mark, on one line.
    cause = text.rpartition("WeightsUnpickler error:")[2].strip().split("\n")[0]
    return (
        f"damaged, or not a weights file (starts with {head!r}; {type(error).__name__}: {cause:.200}); download it "
        f"again, or {HINT}"
    )


def _is_dense(value: object) -> bool:
    """Return whether `value` is a tensor with one stored number per element."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_nested)


def _check_size(path: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise CheckpointError(f"{path}: file is {size >> 30} GiB; the limit is {MAX_BYTES >> 30} GiB")


def load_external_state_dict(model: nn.Module, state: Mapping[str, Tensor], where: object, config: str) -> None:
    """Load a state dict strictly, with everything that does not fit in one message.

    Args:
        where: file of the weights, for the message.
        config: what defines the architecture, e.g. `detector.backbone`, for the message.

    Raises:
        CheckpointError: lists missing and unexpected keys and wrong shapes.
    """
    expected = model.state_dict()
    # Batch norm's counters have no effect in eval mode, and older published weights lack them.
    counters = {name: tensor for name, tensor in expected.items() if name.endswith(_COUNTER)}
    state = counters | {
        name: tensor for name, tensor in state.items() if name in expected or not name.endswith(_COUNTER)
    }
    check_state_dict(expected, state, where, config)
    model.load_state_dict(state)


def check_state_dict(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], where: object, config: str) -> None:
    """Check that a state dict has the names and shapes that are expected; arguments as `load_external_state_dict`.

    Raises:
        CheckpointError: lists missing and unexpected keys and wrong shapes.
    """
    problems = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(expected[name].shape)}"
            for name in sorted(expected.keys() & state.keys())
            if expected[name].shape != state[name].shape
        ],
    }
    if any(problems.values()):
        lines = [f"  {len(keys)} {problem}: {shorten_list(keys)}" for problem, keys in problems.items() if keys]
        raise CheckpointError(f"{where}: the weights do not fit the architecture of {config}:\n" + "\n".join(lines))
