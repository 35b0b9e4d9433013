"""What a target is, and what several of them have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
Attempt = Callable[[bytes], Any]
Prepared = tuple[Attempt, bytes]  # what takes an input, and a sound one
DEEP = b"[" * 50_000
_OUT = "../" * 4 + "outside/secret.txt"
PATHS = (_OUT, f"a/../{_OUT}", "/etc/passwd", "link.png", "file:///etc/passwd")  # that lead out of a folder


@dataclass(frozen=True)
class Target:
    """form: how its bytes are best changed (mutate.py). prepare: makes the files around the input in a folder, once,
    and gives what takes an input, and a sound one. hostile: inputs that are known to be none, by name."""

    name: str
    form: str
    prepare: Callable[[Path], Prepared]
    hostile: dict[str, bytes] = dataclasses.field(default_factory=dict)
    share: float = 1.0  # of the inputs: less for what takes long


def in_place(path: Path, then: Callable[[], Any]) -> Prepared:
    """Puts an input in the place of `path`, which is whole again afterwards."""
    whole = path.read_bytes()

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            then()
        finally:
            path.write_bytes(whole)

    return attempt, whole
