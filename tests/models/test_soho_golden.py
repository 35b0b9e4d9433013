"""SOHO computes what it did when its numbers were recorded, on the same weights and inputs (tests/golden_soho.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_soho import VARIANTS, numbers

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_soho.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_those_recorded(name: str) -> None:
    found = numbers(name)
    assert found.keys() == GOLDEN[name].keys()
    for key, expected in GOLDEN[name].items():
        assert found[key] == pytest.approx(expected, rel=1e-7, abs=1e-9), key


def test_the_variants_differ() -> None:
    assert GOLDEN["paper"]["mlm"] != GOLDEN["released update"]["mlm"] != GOLDEN["public code"]["mlm"]
    assert GOLDEN["paper"]["codes"] != GOLDEN["released update"]["codes"]
    assert GOLDEN["paper"]["fused"] != GOLDEN["tasks on codes"]["fused"]
