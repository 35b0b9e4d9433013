"""Tensors that may be sharded over the processes of a training: torch's `DTensor` (`strategy: fsdp`, contrib/fsdp)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part, in the same memory; an ordinary tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Return a whole tensor, which every process has, sharded as `example`; without communication."""
    tensor = tensor.to(example.device)
    if not isinstance(example, DTensor):
        return tensor
    # None: every process has the whole tensor, so nothing is sent.
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


def whole_like(part: Tensor, example: Tensor) -> Tensor:
    """Gather the tensor whose local part, sharded as `example`, is `part`."""
    if not isinstance(example, DTensor):
        return part
    mesh, placements = example.device_mesh, example.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=example.shape, stride=example.stride()
    ).full_tensor()
