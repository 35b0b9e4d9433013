"""One batch over several processes: sums, negatives and random numbers as if a single process held it all.

Each process holds some of a batch's rows, in the order of ranks; a process may hold none of a batch that is too small.
Without a process group, or in a group of one, everything here is what it would be anyway.

Every process must call these in the same order: what decides a branch in between must be the same on all of them.
Counts and names travel on the CPU (gloo), so that asking for them does not wait for a GPU.

Shape suffixes: B rows of this process, G rows of the whole batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_host_groups: dict[int, Any] = {}  # default group -> the one for tensors on the CPU


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def count_over_ranks(count: int) -> int:
    """The sum over the processes."""
    return sum(row[0] for row in sizes_over_ranks((count,)))


def sizes_over_ranks(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """What each process has to say, by rank; all say as many numbers."""
    if world_size() == 1:
        return [tuple(sizes)]
    own = torch.tensor(list(sizes), dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own, group=_group(own))
    return [tuple(row.tolist()) for row in found]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over the processes, element by element, detached and the same on each of them. All give one shape."""
    values = values.detach()
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, group=_group(total))
    return total


def gather_rows(rows: Tensor) -> Tensor:
    """[B, ...] of every process -> [G, ...], the same on every process; gradients flow back to a row's own process."""
    if world_size() == 1:
        return rows
    return _Gather.apply(rows, [size for (size,) in sizes_over_ranks((len(rows),))])


def take_rows(rows: Tensor, wanted_K: Tensor) -> Tensor:
    """Any rows of the whole batch; gradients flow back to a row's own process.

    rows [B, S, ...]; wanted_K: int64, numbers of rows of the whole batch, in the order of ranks, as many as this
    process likes. Returns [K, S, ...]; S is the largest of any process, zeros fill up.
    """
    if world_size() > 1:
        if rows.dim() > 1:
            wider = max(width for (width,) in sizes_over_ranks((rows.shape[1],))) - rows.shape[1]
            rows = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, wider])
        rows = gather_rows(rows)
    return rows[wanted_K.to(rows.device)]


def previous_rows(rows: Tensor) -> Tensor:
    """Of each row the one before it in the whole batch, of the first the last. Only the processes' last rows travel.

    [B, S, ...]; S is the largest of any process, zeros fill up.
    """
    if world_size() == 1:
        return rows.roll(1, 0)
    sizes = sizes_over_ranks((len(rows), rows.shape[1]))
    wider = max(width for _, width in sizes) - rows.shape[1]
    rows = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, wider])
    lasts = gather_rows(rows[-1:])
    before = sum(count > 0 for count, _ in sizes[: rank()])  # processes with rows
    first = lasts[before - 1 : before] if before else lasts[-1:]
    # Without rows of its own a process still takes part in the gradient of `gather_rows`.
    return torch.cat([first[: len(rows)], rows[:-1]])


def number_over_ranks(names: Sequence[str]) -> tuple[Tensor, slice]:
    """A number for each name of the whole batch, equal where the names are, int64 [G]; and where this process's are.

    Over several processes a number is 63 bits of the name's hash: strings would need as many bytes as the longest.
    """
    if world_size() == 1:
        known: dict[str, int] = {}
        return torch.tensor([known.setdefault(name, len(known)) for name in names]), slice(0, len(names))
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    own = torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in hashes], dtype=torch.int64)
    sizes = [size for (size,) in sizes_over_ranks((len(own),))]
    start = sum(sizes[: rank()])
    return _all_rows(own, sizes), slice(start, start + len(own))


def own_share_of(shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """This process's part, of `shape`, of what `make` makes for the whole batch.

    make: a function of the shape alone, the same on every process, such as a draw from a generator in equal states. The
    first dimension is the rows; the others are as wide as the widest process's. Without dimensions, all get the same.
    """
    if world_size() == 1 or not shape:
        return make(shape)
    shapes = sizes_over_ranks(shape)
    start = sum(size[0] for size in shapes[: rank()])
    widths = tuple(max(sizes) for sizes in list(zip(*shapes, strict=True))[1:])
    whole = make((sum(size[0] for size in shapes), *widths))
    return whole[(slice(start, start + shape[0]), *(slice(0, width) for width in shape[1:]))]


class _Gather(torch.autograd.Function):
    """All-gather whose gradient is the sum, over the processes, of what each of them derived for this one's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _all_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=_group(grad))
        start = sum(ctx.sizes[: rank()])
        return grad[start : start + ctx.sizes[rank()]], None


def _all_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Collectives want equal shapes: all are filled up to the longest, then cut again."""
    sent = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    filled = sent.new_zeros((max(sizes), *rows.shape[1:]))
    filled[: len(rows)] = sent
    found = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(found, filled, group=_group(filled))
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)]).to(rows.dtype)


def _group(tensor: Tensor) -> Any:
    """The process group that carries `tensor`: the default one, or beside NCCL, for the CPU's, a gloo group."""
    default = dist.group.WORLD
    if tensor.device.type != "cpu" or dist.get_backend() == "gloo":
        return default
    if id(default) not in _host_groups:
        _host_groups.clear()
        _host_groups[id(default)] = dist.new_group(backend="gloo")
    return _host_groups[id(default)]


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Numbers for the whole batch, of which this process gets its rows."""
    return own_share_of(shape, lambda size: torch.rand(size, generator=generator, device=generator.device)).to(device)


def draw_categorical(weights_NK: Tensor, generator: torch.Generator) -> Tensor:
    """An outcome of each row, drawn with probabilities in proportion to its weights. int64 [N]

    weights_NK: zero or more. An outcome of weight zero is never drawn, however the sums round; of a row without any
    weight the draw is 0. By inversion: one uniform number a row, which comes from the generator's own device.
    """
    cumulative_NK = weights_NK.float().cumsum(-1)
    place_N1 = draw_uniform((len(weights_NK), 1), generator, weights_NK.device) * cumulative_NK[:, -1:]
    drawn_N = torch.searchsorted(cumulative_NK, place_N1, right=True).squeeze(-1)
    # The place may round up to the sum itself, behind which comes nothing.
    numbers_K = torch.arange(weights_NK.shape[-1], device=weights_NK.device)
    last_N = torch.where(weights_NK > 0, numbers_K, 0).amax(-1)
    return torch.minimum(drawn_N, last_N)
