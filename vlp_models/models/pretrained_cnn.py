"""A CNN's weights by timm's or torchvision's names, for layers/backbone.py: SOHO's, and one before VLMo's patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import Tensor

from vlp_models.models.foreign import Taker
from vlp_models.models.layers.backbone import Backbone


def convert_cnn(
    state: Mapping[str, Tensor], model: str, stage: int, options: Mapping[str, Any], prefix: str
) -> dict[str, Tensor]:
    """Those of `Backbone(model, stage, options)`, which the family calls `prefix`. What the classifier and the stages
    behind `stage` have is left out.

    Raises:
        CheckpointError: names are missing, misshapen, or none of this architecture's.
    """
    with torch.device("meta"):
        own = Backbone(model, stage, options).net.state_dict()
        whole = timm.create_model(model, pretrained=False, **options).state_dict()
    # torchvision began to count batches later than it began to publish weights.
    counters = {name: torch.zeros((), dtype=torch.int64) for name in own if name.endswith("num_batches_tracked")}
    taker = Taker({**counters, **state})
    weights = {name: taker.take(name, *tensor.shape) for name, tensor in own.items()}
    taker.check(f"a {model}", ignored=tuple(sorted(set(whole) - set(own))))
    return {f"{prefix}.net.{name}": tensor.to(own[name].dtype) for name, tensor in weights.items()}
