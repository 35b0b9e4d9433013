"""What this process computes on: GPU or CPU, native bfloat16, number of processors, rank, peak memory."""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.portable import cpu_flags, cpu_vendor, use_portable_kernels

if TYPE_CHECKING:
    import torch


def use_cuda(accelerator: str) -> bool:
    """Return whether to compute on a GPU: there is one, and `trainer.accelerator` allows it."""
    import torch

    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def pick_device(accelerator: str, torch_threads: int = 0) -> str:
    """Return `cuda` or `cpu` for prediction, and set torch's threads (0: leave them as they are)."""
    import torch

    use_portable_kernels()
    if torch_threads:
        torch.set_num_threads(torch_threads)
    return "cuda" if use_cuda(accelerator) else "cpu"


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware has a bfloat16 matmul that pays: GPUs from Ampere on; CPUs with AMX, Arm's BF16 or
    AMD's AVX512-BF16 (from Zen 4 on).

    Intel's AVX512-BF16 without AMX does not: in such a virtual machine a product in bfloat16 took 1.8 times as long as
    in float32; on an AMD EPYC (Zen 5) it took a quarter. False if ONEDNN_MAX_CPU_ISA is set, as in common/portable.py.
    """
    import torch

    if device.type == "cuda":
        # With ROCm any GPU counts; with CUDA, compute capability 8 is Ampere.
        return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
    if device.type != "cpu" or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return False
    # Linux names the flags `amx_bf16` and `avx512_bf16` on x86 and `bf16` on Arm.
    paying = {"amx_bf16", "bf16"} | ({"avx512_bf16"} if cpu_vendor() == "AuthenticAMD" else set())
    return bool(paying & cpu_flags())


def cpu_count(limit: int = 0) -> int:
    """Return how many processors this process may use: by its affinity and its container's limit.

    Args:
        limit: return at most so many; 0: no limit.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Rounded up: 1.5 processors' time is used by two threads.
    count = math.ceil(max(1, min(count, container_cpus())))
    return min(count, limit) if limit else count


def container_cpus(root: Path = Path("/")) -> float:
    """Return how many processors' time the container's cgroup allows, as `docker run --cpus` sets it; without a limit
    infinity.

    Args:
        root: of the file system.
    """
    # A process is limited by its own cgroup and by all above it. Each line is NUMBER:CONTROLLERS:PATH.
    limits = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers == "":  # version 2; in a container without a cgroup namespace, the path is the host's
            limits += [_quota(*_read(folder / "cpu.max").split()) for folder in _from_root(mount, path)]
        elif "cpu" in controllers.split(","):
            for folder in _from_root(mount / "cpu", path):
                limits.append(_quota(*(_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))))
    return min(limits)


def _from_root(mount: Path, path: str) -> list[Path]:
    """Return the folders of a cgroup and of those above it."""
    parts = Path(path.lstrip("/")).parts
    return [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _quota(*texts: str) -> float:
    """Return quota / period; without a limit infinity (`max`, -1, or files that do not exist)."""
    try:
        quota, period = (int(text) for text in texts)
    except ValueError:
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_main_process() -> bool:
    """Return whether this process is rank 0, by the variables that torchrun, SLURM or Lightning's launcher set."""
    # torchrun sets RANK; Lightning's launcher sets LOCAL_RANK and NODE_RANK, and rank 0 has 0 in both.
    names = ["RANK"] if "RANK" in os.environ else ["LOCAL_RANK", "NODE_RANK"]
    if "RANK" not in os.environ and "SLURM_NTASKS" in os.environ:
        names = ["SLURM_PROCID"]
    return all(int(os.environ.get(name) or 0) == 0 for name in names)


def peak_memory_mb() -> float:
    """Return the most memory that this process has held, in MB: the GPU's if it computes there, or the machine's."""
    torch = sys.modules.get("torch")  # a process without torch does not compute on a GPU
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return float(torch.cuda.max_memory_allocated() / 1e6)
    return peak_host_memory_mb()


def peak_host_memory_mb() -> float:
    """Return the most memory of the machine that this process has held, in MB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1e6 if sys.platform == "darwin" else 1e3)  # macOS reports bytes
