"""The section `finetune.NAME.parts` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlp_models.params.schema import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class PartsParams:
    """Train the run in parts and average their weights (contrib/parts); `parts: 4` stands for `parts: {of: 4}`.

    of     parts; an image's id decides which one it is in. 1: the run is trained as a whole
    scale  the result is start + scale * (average of the parts - start)
    """

    of: PositiveInt = 1
    scale: PositiveFloat = 1.0

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        return {"of": value}
