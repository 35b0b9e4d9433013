"""timm's weights as the image side of a model that reads pixels: SOHO's CNN; VLMo's patches and vision experts, or
the CNN before them.

`models.NAME.weights: SOURCE` in params.yaml, or `vlp import-checkpoint SOURCE --format timm --name MODEL`. SOURCE is a
.safetensors or state-dict file, `package:NAME` of an installed package, or timm's own: `timm` for SOHO, whose config
names the model, and for VLMo's `stem: timm`; `timm:NAME` for a ViT.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Asked, Imported
from vlp_models.models.readers import IMAGE_READERS
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
