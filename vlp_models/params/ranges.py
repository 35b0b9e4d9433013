"""Ranges of numbers and names in params.yaml: pydantic checks them, `params/schema.py` tells of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # of paths, commands and queries
Split = Literal["train", "val", "test"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
