"""In which numbers a training computes: what is asked for, what this machine is good at, how the run has begun."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, cast

import torch

from vlp_models.params import TrainerParams

Precision = Literal["32-true", "bf16-mixed"]


def choose_precision(params: TrainerParams) -> Precision:
    """Of a run that begins here.

    `auto` is bf16-mixed on a GPU that computes in it, else 32-true: on a CPU, the same numbers on any. Where
    `bf16-where-native` asks for it, it is bf16-mixed on a CPU as well that multiplies bfloat16 itself; to one that
    imitates it, it is slower than 32-true.
    """
    if params.precision in ("32-true", "bf16-mixed"):
        return cast(Precision, params.precision)
    on_gpu = params.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if params.precision == "auto":
        return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    return "bf16-mixed" if has_native_bfloat16(torch.device("cuda" if on_gpu else "cpu")) else "32-true"


def begun_in(checkpoint: Path) -> Precision | None:
    """The precision of the run that left `checkpoint`, whose weights stay on the disk; None: it does not say."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return cast("Precision | None", state.get("precision"))


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the hardware itself multiplies matrices of bfloat16: GPUs from Ampere on; CPUs with AVX512-BF16, AMX, or
    Arm's BF16. (oneDNN also says that it supports bfloat16 where it only imitates it.)"""
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
