"""The section `validate.influence` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class InfluenceParams:
    """What `validate` removes of the pairs that `vlp influence` has scored.

    worst   share of the scored training captions with the lowest scores that goes into quarantine; 0: none
    report  file with the scores, relative to the project; a copy that git or DVC tracks outlives the next scoring
    """

    worst: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    report: str = "reports/influence.jsonl"
