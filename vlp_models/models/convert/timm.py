"""timm's weights as the image side of a model that reads pixels: SOHO's CNN; VLMo's patches and vision experts, or
the CNN before them.

`models.NAME.image_init: SOURCE` in params.yaml, or `vlp import-checkpoint SOURCE --format timm --name MODEL`. SOURCE is
a .safetensors or state-dict file, `package:NAME` of an installed package, or timm's own: `timm` for SOHO, whose config
names the model, and for VLMo's `stem: timm`; `timm:NAME` for a ViT.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.convert import IMAGE_READERS
from vlp_models.models.convert.mapping import Asked, Imported, Taker
from vlp_models.models.layers.backbone import Backbone
from vlp_models.params.lookup import load


def read_timm(source: Path, asked: Asked) -> Imported:
    """For the model of params.yaml whose family and config `asked` has.

    Raises:
        CheckpointError: its family reads no pixels; and see the family's reader.
    """
    if asked.family not in IMAGE_READERS:
        raise CheckpointError(
            f"timm's weights fill the image side of {' or '.join(IMAGE_READERS)}, not of {asked.family}; a model that "
            "reads regions gets them by `features.source: timm`"
        )
    imported: Imported = load(IMAGE_READERS[asked.family])(source, asked)
    return imported


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
