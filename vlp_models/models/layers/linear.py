"""Linear layers that compute a part of their outputs, and how those with quantized weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import CheckpointError

SCALE = ".weight_scale"  # in a checkpoint: suffix of the scales of a layer with weights of 8 bits
QUANTIZED_LAYERS = Table("quantized_layers", {})  # type of the weights -> `module:function`


class PackedLinear(nn.Linear):
    """A linear layer whose outputs are several projections side by side; a call may compute a part of them."""

    computes_parts = True

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """[..., D] -> [..., the selected outputs]. rows None: all outputs."""
        if rows is None:
            return super().forward(x)
        return F.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])


def project_part(layer: nn.Module, x: Tensor, rows: slice) -> Tensor:
    """Return some outputs of a `PackedLinear`, or of a module that replaced it and can only compute all of them.

    peft's LoRA layer is such a module: it adds a product of full width to what the wrapped layer returns.
    """
    # Looked up on the class, because a wrapper may return the attributes of the layer inside.
    computes_parts = getattr(type(layer), "computes_parts", False)
    part: Tensor = layer(x, rows) if computes_parts else layer(x)[..., rows]
    return part


def use_quantized_layers(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the linear layers that have weights of 8 bits in a checkpoint; their values are loaded afterwards.

    Raises:
        CheckpointError: contrib/int8 is missing, or a scale belongs to no linear layer.
    """
    if not any(key.endswith(SCALE) for key in weights):
        return
    if "int8" not in QUANTIZED_LAYERS:
        raise CheckpointError("weights of 8 bits need vlp_models/contrib/int8, which is not installed")
    import_target(QUANTIZED_LAYERS["int8"])(module, weights)
