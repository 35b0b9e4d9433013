"""What dvc.lock recorded of a stage's inputs and outputs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vlp_models.pipeline.dvc.repair import lock_entry


def recorded(root: Path, stage: str, path: str) -> str | None:
    """The md5 that dvc.lock has for a path that a stage depends on, or makes; None where it says nothing."""
    entry = lock_entry(root, stage) or {}
    for place in (*entry.get("deps", []), *entry.get("outs", [])):
        if place["path"] == path:
            return str(place.get("md5", "")) or None
    return None


def md5_of(file: Path) -> str | None:
    """As DVC takes it of a file; None of one that is not there."""
    if not file.is_file():
        return None
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()
