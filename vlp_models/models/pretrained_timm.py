"""timm's weights as the image side of a model that reads pixels: SOHO's CNN, VLMo's patches and vision experts.

`vlp import-checkpoint SOURCE --format timm --name MODEL`. SOURCE is a .safetensors or state-dict file, `package:NAME`
of an installed package, or timm's own: `timm` for SOHO, whose config names the model, `timm:NAME` for VLMo.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.errors import CheckpointError
from vlp_models.lookup import load
from vlp_models.models.foreign import Asked, Imported

# family -> module:function, called with the source and `Asked`
READERS: dict[str, str] = {
    "soho": "vlp_models.models.soho.convert_parts:read_timm_backbone",
    "vlmo": "vlp_models.models.vlmo.timm_vit:read_timm_vit",
}


def read_timm(source: Path, asked: Asked) -> Imported:
    """For the model of params.yaml whose family and config `asked` has.

    Raises:
        CheckpointError: its family reads no pixels; and see the family's reader.
    """
    if asked.family not in READERS:
        raise CheckpointError(
            f"timm's weights fill the image side of {' or '.join(READERS)}, not of {asked.family}; a model that reads "
            "regions gets them by `features.source: timm`"
        )
    imported: Imported = load(READERS[asked.family])(source, asked)
    return imported
