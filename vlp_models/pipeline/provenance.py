"""What a training is made of: told beside its resume states from the beginning, and in its checkpoint at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.params import StreamParams

NOTE = "made-of.json"  # in the work directory: {"provenance": ..., "detector_id": ...}


def provenance_of(
    settings: Mapping[str, Any], files: Mapping[str, Path], stream: StreamParams | None
) -> dict[str, Any]:
    """
    Args:
        files: what it reads, by the names that its checkpoint gives them.
        stream: how the shards are read, which decides the order of samples.
    """
    found = {"params": dict(settings), "inputs": {key: hash_path(path) for key, path in files.items()}}
    if stream is not None and stream.address:
        found["stream"] = {"block_mb": stream.block_mb, "window": stream.window}
    return found


def note(work: Path, provenance: Mapping[str, Any], detector_id: str) -> None:
    """detector_id: who made the regions that the model reads; empty: it reads none."""
    write_json(work / NOTE, {"provenance": provenance, "detector_id": detector_id})


def noted(work: Path) -> tuple[Mapping[str, Any], str] | None:
    """Provenance and detector; None: nothing is noted, as beside states of earlier versions."""
    if not (work / NOTE).exists():
        return None
    found = read_json(work / NOTE)
    return found["provenance"], found["detector_id"]
