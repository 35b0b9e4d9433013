"""The section `features.joined` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlp_models.params import TimmParams


@dataclass(frozen=True, kw_only=True)
class JoinedParams:
    """The backbones of `features.source: joined`; the stage `detector` prepares them.

    models  sections as `features.timm`; classes and the order of the regions are the first one's
    """

    models: list[TimmParams] = field(default_factory=list)
