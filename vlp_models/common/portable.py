"""`trainer.reproducible: portable`: the same digits on every x86-64 processor with AVX2.

PyTorch's libraries choose their code by the processor: its widest vectors, its maker, its number of cores. Each choice
adds the same numbers in another order. In this mode

- every operation has one thread. More processes do more (`cpu_processes` of a run), and a detector's training computes
  the two halves of a batch at the same time, if there are two processors (vision/training.py);
- PyTorch, oneDNN and NumPy use AVX2 and no wider vectors;
- MKL uses the code that is the same for Intel and AMD, which is SSE2. Matrix products, for which that is slow, are done
  by NumPy's OpenBLAS with the kernels for one processor, Haswell; they are as fast as MKL's;
- square roots are NumPy's, which are correctly rounded. MKL's begin with an instruction that approximates differently
  on each maker's processors.

benchmarks/portable.py computes on emulated processors of both makers; docs/guides/reproducibility.md lists results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

# The libraries read these when they are imported.
INSTRUCTIONS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
    "MKL_CBWR": "COMPATIBLE",
}
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
VARIABLES = INSTRUCTIONS | THREADS
NEEDED = {"avx2", "fma", "bmi2"}  # Intel's processors since 2013, AMD's since 2015


@cache
def cpu_flags() -> frozenset[str]:
    """Return the processor's features as Linux names them; empty on other systems."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_vendor() -> str:
    """Return the processor's maker as Linux names it, such as `AuthenticAMD`; empty on other systems and on Arm."""
    return _cpuinfo("vendor_id")


def _cpuinfo(*names: str) -> str:
    """Return the value of the first line of /proc/cpuinfo with one of these names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    # A line is `flags : fpu vme de ...`; all processors have the same, so the first one is enough.
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def choose_instructions(reproducible: str) -> None:
    """Apply `trainer.reproducible` to this process and those that it starts, before NumPy and PyTorch are imported.

    A process that has imported NumPy before, such as a notebook, keeps its instructions, with a warning.
    """
    if reproducible != "portable" or is_portable():
        return
    if "numpy" in sys.modules:
        logger.warning(
            "trainer.reproducible: portable: not in this process, which imported NumPy before; its digits are those of "
            "this kind of processor"
        )
    elif NEEDED - cpu_flags():
        logger.warning(
            "trainer.reproducible: portable: this processor lacks AVX2; its digits are those of its kind only. Set "
            "`machine` to be rid of this line"
        )
    else:
        os.environ.update(VARIABLES)


def is_portable() -> bool:
    """Return whether this process runs with the variables, whatever params.yaml asks for: a notebook may not."""
    return os.environ.items() >= VARIABLES.items()


def use_portable_kernels() -> None:
    """Replace PyTorch's matrix products and square roots on CPUs, for the rest of this process, if it is portable."""
    if is_portable():
        _replace_kernels()


# Cached, because the kernels last as long as the library object does.
@cache
def _replace_kernels() -> Any:
    """Register the kernels; return their library, which unregisters them when it is deleted."""
    import warnings

    import numpy as np
    import torch

    class Memory:
        """A tensor's memory for NumPy. After `Tensor.numpy()`, FSDP2 could not free a weight that it has gathered."""

        __slots__ = ("__array_interface__",)

        def __init__(self, tensor: Tensor) -> None:
            self.__array_interface__ = {
                "version": 3,
                # Little-endian float32; strides are in bytes, four per element.
                "typestr": "<f4",
                "data": (tensor.data_ptr(), False),
                "shape": tensor.shape,
                "strides": tuple([4 * stride for stride in tensor.stride()]),
            }

    def array(tensor: Tensor) -> np.ndarray:
        """Return a view, to be used while the tensor exists."""
        return np.asarray(Memory(tensor))

    def product(a: Tensor, b: Tensor) -> Tensor:
        # (..., n, k) @ (..., k, m) -> (..., n, m), with no leading dimension for mm and one for bmm.
        result = a.new_empty((*a.shape[:-1], b.shape[-1]))
        np.matmul(array(a), array(b), out=array(result))
        return result

    def added_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        # beta * c + alpha * (a @ b)
        result = product(a, b)
        if alpha != 1:
            result.mul_(alpha)
        # With beta = 0, PyTorch ignores `c`, even if it has NaN; 0 * NaN would be NaN.
        return result.add_(c, alpha=beta) if beta else result

    def square_root(a: Tensor) -> Tensor:
        result = torch.empty_like(a)
        np.sqrt(array(a), out=array(result))
        return result

    def square_root_in_place(a: Tensor) -> Tensor:
        np.sqrt(array(a), out=array(a))
        return a

    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Tensor]] = {"mm": product, "bmm": product}
    kernels |= {"addmm": added_product, "baddbmm": added_product}
    kernels |= {"sqrt": square_root, "sqrt_": square_root_in_place}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the operators have a kernel already
        for name, kernel in kernels.items():
            # The kernel as it is now, to call it for other types: after `impl`, the dispatcher finds only the new one.
            original = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _for_floats(kernel, original), "CPU", with_keyset=True)
    return library


def _for_floats(kernel: Callable[..., Tensor], original: Any) -> Callable[..., Tensor]:
    """Return a kernel for float32 that leaves other types to the original."""
    import torch

    def choose(keys: Any, *tensors: Tensor, **scale: float) -> Tensor:
        if all(tensor.dtype is torch.float32 for tensor in tensors):
            return kernel(*tensors, **scale)
        result: Tensor = original.call_boxed(keys, *tensors, **scale)
        return result

    return choose
