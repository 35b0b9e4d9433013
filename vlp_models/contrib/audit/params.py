"""The section `validate.audit` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

Kind = Literal["swapped", "empty", "copied", "language", "near_duplicate"]
Above = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class AuditParams:
    """What `validate` removes of the pairs that `vlp audit` lists, besides those that were removed on its page.

    above  training captions with a higher score go into quarantine; null: none
    kinds  of findings whose score counts
    """

    above: Above | None = None
    kinds: list[Kind] = field(default_factory=lambda: ["swapped"])
