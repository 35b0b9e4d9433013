"""One batch spread over several processes: sums, rows and random numbers as if one process held the whole batch.

Each process holds some of a batch's rows, in rank order; a process may hold none of a small batch. Without a process
group, or in a group of one, every function here is the identity or its single-process equivalent.

All processes must call these functions in the same order, so any condition that decides whether to call one must be the
same on all of them. Counts and names are exchanged on the CPU (gloo), so that they do not wait for a GPU.

Shape suffixes: B rows of this process, G rows of the whole batch, N rows, K outcomes or requested rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_host_groups: dict[int, Any] = {}  # id of the default group -> its gloo group for CPU tensors


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


# ---- Sums and sizes ----------------------------------------------------------------------------------------------


def count_over_ranks(count: int) -> int:
    """Return the sum of `count` over the processes."""
    return sum(row[0] for row in sizes_over_ranks((count,)))


def sizes_over_ranks(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each process's `sizes`, by rank. All must pass equally many."""
    if world_size() == 1:
        return [tuple(sizes)]
    local_sizes = torch.tensor(list(sizes), dtype=torch.int64)
    gathered = [torch.empty_like(local_sizes) for _ in range(world_size())]
    dist.all_gather(gathered, local_sizes, group=_group(local_sizes))
    return [tuple(row.tolist()) for row in gathered]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise sum over the processes, detached, the same on all. All must pass the same shape."""
    values = values.detach()
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, group=_group(total))
    return total


# ---- Rows of the whole batch -------------------------------------------------------------------------------------


def gather_rows(rows: Tensor) -> Tensor:
    """Gather [B, ...] of every process to [G, ...], the same on all; gradients flow back to each row's own process."""
    if world_size() == 1:
        return rows
    return _Gather.apply(rows, [size for (size,) in sizes_over_ranks((len(rows),))])


def take_rows(rows: Tensor, numbers_K: Tensor) -> Tensor:
    """Fetch any rows of the whole batch; gradients flow back to each row's own process.

    rows [B, S, ...]; numbers_K int64: row numbers in the whole batch, in rank order; each process may request any
    number of them. Returns [K, S, ...], where S is the largest of any process, padded with zeros.
    """
    if world_size() > 1:
        if rows.dim() > 1:
            # Sequences get the length of the longest on any process, because gathering needs equal shapes.
            wider = max(width for (width,) in sizes_over_ranks((rows.shape[1],))) - rows.shape[1]
            # F.pad lists the dimensions from the last one, so the pair for dimension 1 comes at the end.
            rows = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, wider])
        rows = gather_rows(rows)
    return rows[numbers_K.to(rows.device)]


def previous_rows(rows: Tensor) -> Tensor:
    """Return, for each row, the previous row of the whole batch; for the first row, the last one.

    Only the processes' last rows are exchanged. [B, S, ...], where S is the largest of any process, padded with zeros.
    """
    if world_size() == 1:
        return rows.roll(1, 0)
    sizes = sizes_over_ranks((len(rows), rows.shape[1]))
    wider = max(width for _, width in sizes) - rows.shape[1]
    rows = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, wider])
    # One row of each process that has any, in rank order.
    lasts = gather_rows(rows[-1:])
    before = sum(count > 0 for count, _ in sizes[: rank()])  # earlier processes that have rows
    # Before the first process with rows comes the last one: the order is a circle.
    first = lasts[before - 1 : before] if before else lasts[-1:]
    # Also a process without rows must take part in the gradient of `gather_rows`.
    return torch.cat([first[: len(rows)], rows[:-1]])


def number_over_ranks(names: Sequence[str]) -> tuple[Tensor, slice]:
    """Return a number for each name of the whole batch, int64 [G], and the slice of this process's names.

    Equal names have equal numbers. With several processes a number is 63 bits of the name's hash, because strings would
    all have to be padded to the longest.
    """
    if world_size() == 1:
        number_of: dict[str, int] = {}
        return torch.tensor([number_of.setdefault(name, len(number_of)) for name in names]), slice(0, len(names))
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    # 63 bits, because int64 has a sign.
    local_numbers = torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in hashes], dtype=torch.int64)
    sizes = [size for (size,) in sizes_over_ranks((len(local_numbers),))]
    start = sum(sizes[: rank()])
    return _all_rows(local_numbers, sizes), slice(start, start + len(local_numbers))


class _Gather(torch.autograd.Function):
    """All-gather. The gradient of a process's rows is the sum of the gradients that all processes derived for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _all_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy, because the sum is written in place.
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=_group(grad))
        start = sum(ctx.sizes[: rank()])
        return grad[start : start + ctx.sizes[rank()]], None


def _all_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """All-gather rows of different counts: pad to the longest, because collectives need equal shapes, then cut."""
    # Booleans are sent as bytes, which every backend supports.
    sent = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    padded = sent.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = sent
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=_group(padded))
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)]).to(rows.dtype)


def _group(tensor: Tensor) -> Any:
    """Return the process group for `tensor`: the default one, but for CPU tensors a gloo group if that is NCCL."""
    default = dist.group.WORLD  # plain-ok
    if tensor.device.type != "cpu" or dist.get_backend() == "gloo":
        return default
    if id(default) not in _host_groups:
        _host_groups.clear()
        _host_groups[id(default)] = dist.new_group(backend="gloo")
    return _host_groups[id(default)]


# ---- Random numbers ----------------------------------------------------------------------------------------------


def draw_local_rows(shape: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Call `draw` for the whole batch and return this process's rows of the result, of shape `shape`.

    draw: a function of the shape alone that gives the same result on every process, such as a draw from generators in
        equal states. The first dimension is the rows; the others are as wide as the widest process's. With an empty
        shape, all processes get the same number.
    """
    if world_size() == 1 or not shape:
        return draw(shape)
    shapes = sizes_over_ranks(shape)
    rows, *widths = zip(*shapes, strict=True)  # of each process
    start = sum(rows[: rank()])
    batch_rows = draw((sum(rows), *map(max, widths)))
    return batch_rows[(slice(start, start + shape[0]), *(slice(0, width) for width in shape[1:]))]


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw uniform numbers for the whole batch, return this process's rows on `device`."""

    def draw(size: tuple[int, ...]) -> Tensor:
        return torch.rand(size, generator=generator, device=generator.device)

    return draw_local_rows(shape, draw).to(device)


def draw_categorical(weights_NK: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an outcome for each row with probabilities proportional to its weights. int64 [N]

    weights_NK: zero or more. An outcome of weight zero is never drawn, however the sums round; a row without any weight
    gives 0. By inversion: one uniform number per row, drawn on the generator's own device.
    """
    cumulative_NK = weights_NK.float().cumsum(-1)
    point_N1 = draw_uniform((len(weights_NK), 1), generator, weights_NK.device) * cumulative_NK[:, -1:]
    # right=True: a point of exactly 0 falls behind leading outcomes of weight zero.
    drawn_N = torch.searchsorted(cumulative_NK, point_N1, right=True).squeeze(-1)
    # The position may round up to the sum itself, which would be an outcome past the end.
    numbers_K = torch.arange(weights_NK.shape[-1], device=weights_NK.device)
    last_N = torch.where(weights_NK > 0, numbers_K, 0).amax(-1)
    return torch.minimum(drawn_N, last_N)
