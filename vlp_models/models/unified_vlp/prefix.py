"""What a text that is generated attends to of its image.

Shape suffixes: B images, P places of the prefix: [CLS], the regions, [SEP].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vlp_models.models.layers.attention import KeyValues


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values of each layer, once an image."""

    layers: tuple[KeyValues, ...]
    mask_BP: Tensor

    @property
    def images(self) -> int:
        return self.mask_BP.shape[0]
