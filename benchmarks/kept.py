"""Where a benchmark's figures are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def keep(name: str, record: Mapping[str, Any]) -> str:
    """Writes benchmarks/results/NAME.json; returns what it says."""
    told = json.dumps(record, indent=2)
    (RESULTS / f"{name}.json").write_text(told + "\n", encoding="utf-8")
    return told
