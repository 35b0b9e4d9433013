"""What is chosen by a name in params.yaml is imported when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from vlp_models.errors import ParamsError
from vlp_models.params.schema import nearest


def load(place: str) -> Any:
    """The object at `package.module:Name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def check_known(name: str, table: Mapping[str, str], where: str) -> None:
    """
    Args:
        table: of places by name.
        where: the name's place in params.yaml.

    Raises:
        ParamsError: the table has no such name.
    """
    if name not in table:
        raise ParamsError(f"params.yaml: `{where}: {name}`: there is none{nearest(name, table)}")
