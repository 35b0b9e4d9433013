"""Correct gradients of batch norm on a CPU, where torch misreads some memory layouts.

torch's CPU backward of batch norm (2.15) reads its input and the incoming gradient in the layout that their strides
suggest. The stride of a dimension of size one is arbitrary, so a tensor may be dense in channels-last order while its
strides suggest the plain order. Batch norm's backward then takes channels for positions and returns wrong gradients of
input, weight and bias without an error, in training mode, in eval mode and with frozen weights. The forward pass is
right. It happens with a batch of one image whose map becomes tokens, `map.flatten(2).transpose(1, 2)`, and with maps of
one row or one column.

InstanceNorm2d has a similar fault; no model here has one. 1-D batch norm, layer norm, group norm, convolutions, pooling
and activations give the same gradients for every layout.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions

M = TypeVar("M", bound=nn.Module)


def fix_batch_norm_gradients(model: M) -> M:
    """Make every batch norm of the model copy what its backward would misread; return the model.

    Nothing else changes: no copy on a GPU, or of maps without a dimension of size one. Calling it again has no effect.
    Replaced or added modules need another call.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _hook_gradient not in module._forward_hooks.values():
            module.register_forward_pre_hook(_copy_misread_input)
            module.register_forward_hook(_hook_gradient)
    return model


def is_misread(x: Tensor) -> bool:
    """Return whether batch norm's CPU backward may take the tensor for one in the plain layout, which it is not in."""
    if x.dim() not in CHANNELS_LAST or x.device.type != "cpu" or 1 not in x.shape:
        return False
    # Dense in the plain order, or not dense in channels-last order: nothing to misread.
    if x.is_contiguous() or not x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]):
        return False
    # The strides of a new channels-last tensor, which torch recognizes: 1 for channels, then from the last dimension on
    step = x.shape[1]
    for dimension in (*range(x.dim() - 1, 1, -1), 0):
        if x.stride(dimension) != step:
            return True
        step *= x.shape[dimension]
    return x.stride(1) != 1


def _copy_misread_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not torch.is_grad_enabled() or not is_misread(args[0]):
        return None
    return (args[0].contiguous(), *args[1:])


def _hook_gradient(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    # Only a dimension of size one makes a layout ambiguous; other outputs get no hook.
    if output.requires_grad and output.device.type == "cpu" and output.dim() in CHANNELS_LAST and 1 in output.shape:
        output.register_hook(lambda gradient: gradient.contiguous() if is_misread(gradient) else gradient)
