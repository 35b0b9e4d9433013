"""Weights of other programs, taken apart name by name so that nothing is missed or left over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlp_models.common.state_dicts import read_state_dict, some
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts
from vlp_models.params.schema import build

T = TypeVar("T")
__all__ = ["Asked", "Imported", "Taker", "read_json", "read_state_dict"]


def read_json(file: Path, kind: type = dict) -> Any:
    """
    Raises:
        CheckpointError: can't be read, or not a `kind` (dict or list).
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: not a JSON {'object' if kind is dict else 'list'}")
    return value


class Taker:
    """Hands out tensors by name and remembers what was missing, misshapen or never asked for."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """float32, a copy. A missing or misshapen one is empty, and reported by `check`."""
        self.taken.add(name)
        tensor = self.state.get(name)
        if tensor is None:
            self._missing.append(name)
        elif tuple(tensor.shape) != shape:
            self._misshapen.append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        else:
            return tensor.to(torch.float32, copy=True).contiguous()
        return torch.empty(0)

    def check(self, what: str, ignored: tuple[str, ...] = ()) -> None:
        """
        Args:
            what: the layout that was expected, for the message.
            ignored: beginnings of names that may be left over.

        Raises:
            CheckpointError: lists the missing, unexpected and misshapen.
        """
        unexpected = sorted(n for n in self.state if n not in self.taken and not n.startswith(ignored or ("\0",)))
        parts = (("missing", self._missing), ("unexpected", unexpected), ("of another shape", self._misshapen))
        if any(names for _, names in parts):
            lines = [f"  {len(names)} {word}: {some(names)}" for word, names in parts if names]
            raise CheckpointError(f"not {what}:\n" + "\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an import was asked for beside the file.

    facts   of the data at hand
    config, family  of the model in params.yaml, for a format that does not tell the architecture
    task    what a task's model was trained for, where the file could be two
    heads   attention heads; 0: as the format usually has them
    vocabulary, lowercase  the tokenizer's
    root, where  what a path starts from, and the place that names the weights, for messages
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

    def built(self, config_class: type[T], **more: Any) -> T:
        """`config` with the data's facts, and `more`, as the family has it.

        Raises:
            ParamsError: an unknown key, or a value out of range.
        """
        return build(config_class, {**self.config, **self.facts.told(config_class), **more}, where="config")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """
    family   one of `models.FAMILIES`
    what     whose weights these are, in words
    config   the family's config as far as it follows from the file; the data's facts among it are checked
    weights  by the family's names; the rest of the model stays fresh
    task     of which it is a model; None: pretrained
    head     of the task's classifier, by the names it has there
    notes    what the config says that the file does not, for preset.yaml
    left_out names in the file that found no place
    regions  whether it reads any
    """

    family: str
    what: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    task: str | None = None
    head: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    regions: bool = True
