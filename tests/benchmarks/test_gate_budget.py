"""The simulation of the error budget decides as the gate does, though it runs the gate only where that may promote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gate_budget


@pytest.mark.slow
def test_decisions_that_are_skipped_would_not_promote(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = gate_budget.Cell(kind="skewed", test="growing", rule="per test", weeks=6, series=60, seed=3)
    likely = gate_budget.simulate(cell)
    monkeypatch.setattr(gate_budget, "MARGIN", 1e9)
    everywhere = gate_budget.simulate(cell)
    assert likely["promoted"] == everywhere["promoted"] > 0
    assert likely["decisions"] < everywhere["decisions"] / 5
