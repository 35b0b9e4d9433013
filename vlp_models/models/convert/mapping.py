"""Weights of other programs: what a reader gets and returns, and mapping them name by name so that none is missed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError, shorten_list
from vlp_models.models import DataFacts
from vlp_models.params.schema import build

T = TypeVar("T")


class StateDictMapping:
    """Maps the tensors of another program's state dict to a family's names.

    Every tensor is taken once by its name; `check` then lists the missing, those of a wrong shape and those not used.

    state    the other program's tensors
    taken    names that were asked for
    weights  the mapped tensors, by the family's names
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.taken: set[str] = set()
        self.weights: dict[str, Tensor] = {}
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a float32 copy. A missing or misshapen tensor is returned empty, and reported by `check`."""
        # Problems are collected, not raised, so that `check` can list all of them together.
        self.taken.add(name)
        tensor = self.state.get(name)
        if tensor is None:
            self._missing.append(name)
        elif tuple(tensor.shape) != shape:
            self._misshapen.append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        else:
            return tensor.to(torch.float32, copy=True).contiguous()
        return torch.empty(0)

    def check(self, layout: str, ignored: tuple[str, ...] = ()) -> None:
        """Check that every tensor was there and was taken.

        Args:
            layout: what the state dict was expected to be, for the message.
            ignored: prefixes of names that may be left over.

        Raises:
            CheckpointError: lists the missing, unexpected and misshapen tensors.
        """
        unexpected = sorted(n for n in self.state if n not in self.taken and not n.startswith(ignored))
        parts = (("missing", self._missing), ("unexpected", unexpected), ("of another shape", self._misshapen))
        if any(names for _, names in parts):
            lines = [f"  {len(names)} {word}: {shorten_list(names)}" for word, names in parts if names]
            raise CheckpointError(f"not {layout}:\n" + "\n".join(lines))

    # ---- What the names and shapes say of the architecture ------------------------------------------------------

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.state)

    def size(self, name: str, dim: int) -> int:
        """Return one dimension of a tensor; 0 if it is missing, which `check` reports once the tensor is taken."""
        tensor = self.state.get(name)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the sizes follow from.

        Raises:
            CheckpointError: the tensor is missing.
        """
        tensor = self.state.get(name)
        if tensor is None:
            raise CheckpointError(f"not a checkpoint of this layout: it has no `{name}`")
        return tuple(tensor.shape)

    def numbers(self, pattern: str) -> list[int]:
        """Return the numbers that the pattern's group matches at the start of names, sorted: the layers there are."""
        return sorted({int(match[1]) for name in self.state if (match := re.match(pattern, name))})

    # ---- Groups of tensors that are mapped together -------------------------------------------------------------

    def linear(self, target: str, source: str, outputs: int, inputs: int, *, bias: bool = True) -> None:
        self.weights[f"{target}.weight"] = self.take(f"{source}.weight", outputs, inputs)
        if bias:
            self.weights[f"{target}.bias"] = self.take(f"{source}.bias", outputs)

    def norm(self, target: str, source: str, size: int) -> None:
        for part in ("weight", "bias"):
            self.weights[f"{target}.{part}"] = self.take(f"{source}.{part}", size)

    def batch_norm(self, target: str, source: str, size: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            self.weights[f"{target}.{part}"] = self.take(f"{source}.{part}", size)
        # A count without dimensions; `take` returns float32.
        self.weights[f"{target}.num_batches_tracked"] = self.take(f"{source}.num_batches_tracked").long()

    def pop_head(self) -> dict[str, Tensor]:
        """Remove the weights below `head.` and return them without that prefix: a task's classifier."""
        names = [name for name in self.weights if name.startswith("head.")]
        return {name.removeprefix("head."): self.weights.pop(name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """What an importer gets besides the file.

    facts    of the data
    config, family  of the model in params.yaml, for a format whose files do not name the architecture
    task     the task that a fine-tuned model is for, if the file leaves it open
    heads    attention heads; 0: the format's usual number
    vocabulary, lowercase  of the tokenizer
    root     the folder that relative paths start from
    where    the params key or argument that names the weights, for messages
    """

    facts: DataFacts
    config: Mapping[str, Any]
    family: str = ""
    task: str = ""
    heads: int = 0
    vocabulary: tuple[str, ...] = ()
    lowercase: bool = True
    root: Path = Path()
    where: str = "SOURCE"

    def build_config(self, config_class: type[T], **more: Any) -> T:
        """Return `config`, with the data's facts and `more`, as the family's config.

        Raises:
            ParamsError: an unknown key, or a value out of range.
        """
        return build(config_class, {**self.config, **self.facts.for_config(config_class), **more}, where="config")


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """What an importer returns.

    family   one of `models.FAMILIES`
    origin   whose weights these are, for messages: "BEiT", "VLMo's vqa"
    config   the family's config as far as the file determines it; facts of the data in it are checked
    weights  by the family's names; the rest of the model keeps its initialization
    task     the task that the model was fine-tuned for; None: pretrained
    head     the task's classifier, by the names of its head
    notes    lines for preset.yaml: settings that the file does not determine
    left_out names in the file without a place in the model
    reads_regions  whether the model reads region features
    """

    family: str
    origin: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    task: str | None = None
    head: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    reads_regions: bool = True
