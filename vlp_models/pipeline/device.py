"""Where a finished model predicts."""

from __future__ import annotations

from vlp_models.params import Params


def device_for(params: Params) -> str:
    """A GPU if there is one and `trainer.accelerator` is not `cpu`; on a CPU with `trainer.torch_threads`."""
    import torch

    if params.trainer.torch_threads:
        torch.set_num_threads(params.trainer.torch_threads)
    return "cuda" if params.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
