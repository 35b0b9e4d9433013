"""The verdicts of `vlp compare` in README and docs are those of the present code (benchmarks/compare_bundles.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    from compare_bundles import COMPARISONS, RESULTS, compare_bundles
finally:
    sys.path.pop(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_recorded_comparison_is_what_compare_prints(name: str) -> None:
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    for row, expected in zip(compare_bundles(*COMPARISONS[name]), recorded, strict=True):
        assert row == pytest.approx(expected, abs=5e-4), (
            "run python benchmarks/compare_bundles.py, then docs/_ext/figures.py"
        )
