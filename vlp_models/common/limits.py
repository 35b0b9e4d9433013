"""Limits on sizes that an untrusted file declares, checked before anything of that size is allocated."""

from __future__ import annotations

import math
from typing import Any

LEAST_SIDE = 4  # pixels of an image: smaller ones show nothing
LARGEST = 1_000_000  # a width, a vocabulary, a length
MOST_LAYERS = 1_000  # they are built one by one


def check_numbers(value: Any, where: str = "") -> None:
    """Check that all numbers in plain data (dicts, lists) are finite and within the limits.

    Raises:
        ValueError: names the key.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_numbers(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{where}` is {value}")
    # In Python, True and False are integers.
    elif isinstance(value, int) and not isinstance(value, bool):
        limit = MOST_LAYERS if any(word in where for word in ("layers", "blocks", "depth")) else LARGEST
        if abs(value) > limit:
            # Python raises a ValueError when it formats an integer of more than 4,300 digits.
            number = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
            raise ValueError(f"`{where}` is {number}; at most {limit:,}")
