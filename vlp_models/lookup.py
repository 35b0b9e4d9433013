"""What is chosen by a name in params.yaml is imported when it is chosen."""

from __future__ import annotations

import importlib
from typing import Any


def load(place: str) -> Any:
    """The object at `package.module:Name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
