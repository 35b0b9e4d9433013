"""Limits on what a foreign file may say of itself, checked before anything of that size is made."""

from __future__ import annotations

import math
from typing import Any

LEAST_SIDE = 4  # pixels of a picture: of less there is nothing to be seen
LARGEST = 1_000_000  # a width, a vocabulary, a length
MOST_LAYERS = 1_000  # each is built in turn


def check_numbers(value: Any, where: str = "") -> None:
    """Numbers within reason, all the way down lists and sections of plain data.

    Raises:
        ValueError: names the key.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_numbers(item, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{where}` is {value}")
    elif isinstance(value, int) and not isinstance(value, bool):
        most = MOST_LAYERS if "layers" in where or "blocks" in where or "depth" in where else LARGEST
        if abs(value) > most:
            shown = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
            raise ValueError(f"`{where}` is {shown}; at most {most:,}")
