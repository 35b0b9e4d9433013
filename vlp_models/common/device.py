"""Which device a stage computes on."""

from __future__ import annotations


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
