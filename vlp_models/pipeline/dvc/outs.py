"""What DVC's lock file says of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def outs_of(lock: Mapping[str, Any]) -> dict[str, str]:
    """Output -> DVC's md5, from the content of a dvc.lock; empty for an output without one."""
    stages = lock.get("stages", {})
    return {out["path"]: out.get("md5", "") for stage in stages.values() for out in stage.get("outs", [])}
