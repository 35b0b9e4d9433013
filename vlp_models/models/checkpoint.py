"""A model on disk: `model.safetensors`, `config.json` and the tokenizer, as in docs/reference/checkpoints.md.

The names of weights start with `model.`, and with `head.` for a task's head. Loading is strict: a checkpoint of another
architecture is an error that lists the differences, never a half-initialized model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlp_models.common.checksums import verify, write_sums
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, ParamsError, explain_system_error, shorten_list
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint_info import CheckpointInfo

WEIGHTS, CONFIG, LABELS = "model.safetensors", "config.json", "labels.json"
ADAPTER_FOLDER = "adapter"  # of a run that trained adapters (contrib/lora): only those, next to the merged weights
UNLIMITED = {"max_text_len": 512, "max_regions": 100}  # for a checkpoint that no data limited
SMALL = 1024  # a width up to this one is no danger to memory


# ---- Writing ------------------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, module: nn.Module, info: CheckpointInfo, tokenizer: Tokenizer, labels: Sequence[str] = ()
) -> None:
    """Write `module`, whose children are `model` and possibly `head`, into an existing directory.

    Args:
        info: becomes config.json.
        labels: names of the classifier's rows (VQA's answers, entailment's labels).

    Raises:
        CheckpointError: the weights cannot be written.
    """
    state = module.state_dict()
    tied = tied_names(state)
    # safetensors stores each tensor once: tied ones under their first name
    weights = {name: t.detach().cpu().contiguous() for name, t in state.items() if name not in tied}
    try:
        # Hugging Face's loaders require the entry `format`.
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        reason = explain_system_error(error)
        raise CheckpointError(f"{directory / WEIGHTS}: cannot be written: {reason}") from error
    write_config(directory, info, tokenizer, labels)
    write_sums(directory)


def write_config(directory: Path, info: CheckpointInfo, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> None:
    """Write the files of a checkpoint except for its weights and sums."""
    text = json.dumps(info.to_json(), indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    tokenizer.save(directory)
    if labels:
        listed = json.dumps(list(labels), indent=0, ensure_ascii=False)
        (directory / LABELS).write_text(listed + "\n", encoding="utf-8")


# ---- Reading ------------------------------------------------------------------------------------------------------


def read_config(directory: Path) -> CheckpointInfo:
    """Read config.json, after verifying the sums of all files.

    Raises:
        CheckpointError: config.json is missing, invalid or of another format, or a file of the checkpoint is damaged.
    """
    verify(directory)
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file}: no such file; is {directory} a checkpoint of this project?") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}; copy or train the checkpoint again") from None
    try:
        return CheckpointInfo.from_json(config if isinstance(config, dict) else {})
    except KeyError as error:
        raise CheckpointError(f"{file}: `{error.args[0]}` is missing; train the checkpoint again") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def read_labels(directory: Path) -> list[str]:
    """Read the names of the classifier's rows.

    Raises:
        CheckpointError: labels.json is missing, or no list of strings.
    """
    file = directory / LABELS
    try:
        labels = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; it names the rows of the classifier") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the labels of the classifier cannot be read: {error}") from None
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{file}: not a list of strings")
    return labels


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read model.safetensors.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    file = directory / WEIGHTS
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or not a safetensors file: {error}") from None


def part_of(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the weights below `part.` (`model` or `head`), without that prefix."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}


def build_from_config(info: CheckpointInfo, tokenizer: Tokenizer, where: Path) -> nn.Module:
    """Build the freshly initialized model that `info` describes. where: the checkpoint's directory.

    Raises:
        CheckpointError: the family is unknown, or its config is invalid or too large for the weights.
    """
    # What a new model would get from the data is in the checkpoint: its tokenizer, and the regions it was trained on.
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        feature_dim=info.feature_dim,
        num_classes=len(info.classes),
    )
    try:
        if _looks_too_large(info.model_config, where):
            # On the meta device a model takes no memory, whatever the config.
            with torch.device("meta"):
                model = build_model(info.family, info.model_config, facts)
            needed = sum(p.numel() for p in model.parameters())
            with contextlib.suppress(OSError):
                stored = (where / WEIGHTS).stat().st_size
                if needed > stored:  # less than a byte per number
                    raise CheckpointError(f"describes {needed:,} weights, but {WEIGHTS} has {stored:,} bytes")
        return build_model(info.family, info.model_config, facts)
    except (ParamsError, CheckpointError) as error:
        reason = str(error).removeprefix("params.yaml: ")  # where configs of new models come from
        raise CheckpointError(f"{where / CONFIG}: {reason}") from None
    except Exception as error:  # the config comes from outside: whatever fails, the file is the cause
        raise CheckpointError(f"{where / CONFIG}: `model_config` describes no valid {info.family}: {error}") from None


def _looks_too_large(config: Mapping[str, Any], directory: Path) -> bool:
    """Return whether the config has a width that no stored tensor has, or more layers than there are tensors.

    Valid checkpoints rarely do; they skip the meta model, whose first use loads modules for two seconds.
    """
    try:
        with safe_open(directory / WEIGHTS, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        read_weights(directory)  # raises with the cause
        return True
    # Integers anywhere in the config, lists included: `re` finds those that are not part of a word or a float.
    text = json.dumps(config, default=str)
    numbers = {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}
    widths = set(itertools.chain.from_iterable(shapes))
    if any(number > SMALL and number not in widths for number in numbers):
        return True
    layers = [value for name, value in config.items() if "layers" in name and isinstance(value, int)]
    return max(layers, default=0) > len(shapes)


def load_checkpoint_weights(module: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Fill every parameter and buffer of `module`. where: the checkpoint's directory.

    Raises:
        CheckpointError: lists missing and unexpected names, and shapes that differ.
    """
    # Tied weights are stored once, so a checkpoint need not have the others' names.
    state = module.state_dict()
    tied = tied_names(state)
    # All differences at once: one of them alone rarely shows which setting is another.
    missing = sorted(set(state) - set(weights) - set(tied))
    unexpected = sorted(set(weights) - set(state))
    other_shape = [
        f"{name} {list(weights[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in sorted(state.items())
        if name in weights and weights[name].shape != tensor.shape
    ]
    if missing or unexpected or other_shape:
        groups = (("missing", missing), ("unexpected", unexpected), ("of another shape", other_shape))
        differences = "; ".join(f"{len(names)} {kind}: {shorten_list(names, 8)}" for kind, names in groups if names)
        raise CheckpointError(f"{where / WEIGHTS}: of another architecture: {differences}")
    module.load_state_dict({name: t for name, t in weights.items() if name not in tied}, strict=False)


def tied_names(state: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of tensors that share their memory with a tensor of an earlier name."""
    first: set[tuple[Any, ...]] = set()
    tied: set[str] = set()
    for name, tensor in state.items():
        if tensor.numel():  # all empty tensors have the same address
            memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if memory in first:
                tied.add(name)
            first.add(memory)
    return frozenset(tied)
