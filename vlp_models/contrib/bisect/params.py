"""The section `bisect` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vlp_models.params.schema import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class BisectParams:
    """Whether the unattended flow looks for what lowered the score of a version that the gate refused.

    hours  budget of each such search; 0: none
    seeds  of a trial at most
    """

    hours: NonNegativeFloat = 0.0
    seeds: Annotated[int, Field(ge=2)] = 5
