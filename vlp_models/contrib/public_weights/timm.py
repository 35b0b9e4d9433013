"""Convert timm's weights to the image side of a model that reads pixels.

They fill SOHO's CNN; and VLMo's patches and vision experts, or the CNN before its patches. `models.NAME.image_init:
SOURCE` in params.yaml, or `vlp import-checkpoint SOURCE --format timm --name MODEL`. SOURCE is a .safetensors or
state-dict file, `package:NAME` of an installed package, or timm's own: `timm` for SOHO, whose config names the model,
and for VLMo's `stem: timm`; `timm:NAME` for a ViT.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vlp_models.common.plugins import import_target
from vlp_models.contrib.public_weights.mapping import StateDictMapping
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import IMAGE_READERS, ImportedModel, ImportRequest
from vlp_models.models.layers.backbone import Backbone


def read_timm(source: Path, request: ImportRequest) -> ImportedModel:
    """Read timm's weights for the model whose family and config `request` holds.

    Raises:
        CheckpointError: the family reads no pixels; or see the family's reader.
    """
    if request.family not in IMAGE_READERS:
        raise CheckpointError(
            f"timm's weights fill the image side of {' or '.join(IMAGE_READERS)}, not of {request.family}; a model "
            "that reads regions uses them with `features.source: timm`"
        )
    imported: ImportedModel = import_target(IMAGE_READERS[request.family])(source, request)
    return imported


def convert_cnn(
    state: Mapping[str, Tensor], model: str, stage: int, options: Mapping[str, Any], prefix: str
) -> dict[str, Tensor]:
    """Convert a CNN's weights by timm's or torchvision's names to those of `Backbone(model, stage, options)`.

    Weights of the classifier and of the stages after `stage` are left out. prefix: the family's name of the backbone.

    Raises:
        CheckpointError: names are missing, misshapen, or not of this architecture.
    """
    # The names that the backbone keeps, and those of the whole model, whose other weights may be left over.
    with torch.device("meta"):
        retained = Backbone(model, stage, options).net.state_dict()
        complete = timm.create_model(model, pretrained=False, **options).state_dict()
    # Early torchvision files have no batch counters.
    counters = {name: torch.zeros((), dtype=torch.int64) for name in retained if name.endswith("num_batches_tracked")}
    mapping = StateDictMapping({**counters, **state})
    weights = {name: mapping.take(name, *tensor.shape) for name, tensor in retained.items()}
    mapping.check(f"a {model}", ignored=tuple(sorted(set(complete) - set(retained))))
    # `take` returns float32, but counters are integers.
    return {f"{prefix}.net.{name}": tensor.to(retained[name].dtype) for name, tensor in weights.items()}
