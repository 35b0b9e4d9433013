"""What this process computes on: GPU or CPU, native bfloat16, number of processors, rank."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def use_cuda(accelerator: str) -> bool:
    """Return whether to compute on a GPU: there is one, and `trainer.accelerator` allows it."""
    import torch

    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def pick_device(accelerator: str, torch_threads: int = 0) -> str:
    """Return `cuda` or `cpu` for prediction, and set torch's threads (0: leave them as they are)."""
    import torch

    if torch_threads:
        torch.set_num_threads(torch_threads)
    return "cuda" if use_cuda(accelerator) else "cpu"


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware itself multiplies bfloat16 matrices: GPUs from Ampere on; CPUs with AVX512-BF16, AMX,
    or Arm's BF16.

    (oneDNN also reports support for bfloat16 on CPUs where it only emulates it.)
    """
    import torch

    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu" and bool({"avx512_bf16", "amx_bf16", "bf16"} & _cpu_flags())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def cpu_count(most: int = 0) -> int:
    """Return how many processors this process may use, at most `most` (0: no limit)."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, most) if most else found


def is_main_process() -> bool:
    """Return whether this process is rank 0, by the variables that torchrun, SLURM or Lightning's launcher set."""
    names = ["RANK"] if "RANK" in os.environ else ["LOCAL_RANK", "NODE_RANK"]
    if "RANK" not in os.environ and "SLURM_NTASKS" in os.environ:
        names = ["SLURM_PROCID"]
    return all(int(os.environ.get(name) or 0) == 0 for name in names)
