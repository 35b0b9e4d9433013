"""State-dict mapping: weights of another program, mapped name by name so that none is missed or left over."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError, shorten_list


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
