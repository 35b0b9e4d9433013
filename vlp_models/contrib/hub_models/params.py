"""The section `features.tower` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TowerParams:
    """The image tower of `features.source: tower`: CLIP, SigLIP or SigLIP 2; the stage `detector` prepares it.

    weights  a folder of transformers' layout, package:NAME or hf://OWNER/NAME@COMMIT
    pooled   one more region, first, with the embedding of the whole image
    """

    weights: str = ""
    pooled: bool = False
