"""A copy of a model's buffers, to undo an update that failed halfway: a forward pass moves running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class BufferCopy:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        for name, buffer in self._model.named_buffers():
            before = self._copy.get(name)
            if before is not None and before.shape == buffer.shape and before.device == buffer.device:
                before.copy_(buffer)
            else:
                self._copy[name] = buffer.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        for name, buffer in self._model.named_buffers():
            if name in self._copy:
                buffer.copy_(self._copy[name])


@contextmanager
def spare_buffers(model: nn.Module) -> Iterator[None]:
    """Within it, forward passes move copies of the buffers; the buffers themselves are not touched.

    Copied back in place, they would be other than what a forward pass before it has saved for its backward pass.
    """
    places = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    spare = {id(buffer): buffer.clone() for _, _, buffer in places}
    try:
        for module, name, buffer in places:
            module._buffers[name] = spare[id(buffer)]
        yield
    finally:
        for module, name, buffer in places:
            module._buffers[name] = buffer
