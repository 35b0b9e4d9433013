"""Linear layers with weights of 8 bits.

They take a quarter of the memory, and decoding, whose steps mostly read weights, is faster. Each row of a matrix (the
weights of one output) is divided by its largest absolute value and rounded to -127 ... 127 (symmetric quantization per
channel; Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only
inference"). Activations keep their precision, but for products of few rows, which take bfloat16. Biases, norms and
embeddings stay float32, and so do matrices that are tied to embeddings.

In a checkpoint such a layer has `NAME.weight` as int8 and `NAME.weight_scale` as float32; `load_task_model` needs
nothing else to recognize it.

Shape suffixes: I inputs, O outputs, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.errors import CheckpointError
from vlp_models.models.layers.linear import SCALE, PackedLinear

SMALLEST = 4096  # weights of a layer; smaller ones are not worth it
FEW_ROWS = 8  # up to here torch's kernel for int8 weights is faster than float32 on CPUs with AVX2


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, for inference; `rows` as in `PackedLinear`."""

    computes_parts = True

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        # Buffers, not parameters: integers have no gradient, and the checkpoint keeps both.
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    weight: Tensor
    weight_scale: Tensor

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """[..., I] -> [..., O], or the selected outputs."""
        part = rows or slice(None)
        weight, scale = self.weight[part], self.weight_scale[part]
        # (..., I) -> (R, I): all leading dimensions become rows.
        x_RI = x.flatten(0, -2)
        if len(x_RI) <= FEW_ROWS and x.device.type == "cpu":
            # The kernel takes bfloat16 activations and multiplies by the scales itself.
            y_RO = torch._weight_int8pack_mm(x_RI.bfloat16(), weight, scale.bfloat16()).to(x.dtype)
        else:
            y_RO = F.linear(x_RI, weight.to(x.dtype)) * scale.to(x.dtype)
        y = y_RO.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[part].to(x.dtype)


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 weights [O, I] and the scales float32 [O] whose product is closest to `weight_OI`."""
    # (O,): the largest weight of each output becomes 127; the clamp avoids a division by 0 in a row of zeros.
    scale_O = (weight_OI.float().abs().amax(dim=1) / 127).clamp_min(1e-12)
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


def quantize_linears(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint with the matrices of the module's linear layers as int8 and their scales."""
    quantized = dict(weights)
    for name, layer in module.named_modules():
        matrix = quantized.get(f"{name}.weight")
        # Exact types: a subclass may compute something else.
        if type(layer) in (nn.Linear, PackedLinear) and matrix is not None and matrix.numel() >= SMALLEST:
            quantized[f"{name}.weight"], quantized[f"{name}{SCALE}"] = quantize(matrix)
    return quantized


def use_int8_layers(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the linear layers that have int8 weights in a checkpoint; their values are loaded afterwards.

    Raises:
        CheckpointError: a scale belongs to no linear layer, or its weights are not int8.
    """
    for key in [key for key in weights if key.endswith(SCALE)]:
        name = key.removesuffix(SCALE)
        # `a.b.c` -> parent `a.b`, child `c`: replace the layer in its parent.
        parent, _, child = name.rpartition(".")
        try:
            layer = module.get_submodule(name)
        except AttributeError:
            layer = None
        matrix = weights.get(f"{name}.weight")
        if type(layer) not in (nn.Linear, PackedLinear) or matrix is None or matrix.dtype != torch.int8:
            raise CheckpointError(f"{key}: a scale without a linear layer's int8 weights")
        assert isinstance(layer, nn.Linear)
        int8_layer = Int8Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        setattr(module.get_submodule(parent), child, int8_layer)
