"""Unified VLP computes, and learns, what it did when tests/golden/golden_unified_vlp.json was recorded.

It was recorded by the model that tests/models/test_unified_vlp.py compares with the paper's formulas.
"""

from __future__ import annotations

import json

import pytest
from golden_unified_vlp import FILE, UPDATES, VARIANTS, curve, numbers

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_the_same(name: str) -> None:
    found, wanted = numbers(name), GOLDEN["numbers"][name]
    assert found.keys() == wanted.keys()
    for key, expected in wanted.items():
        if key == "beams":
            assert found[key] == expected
        else:
            assert found[key] == pytest.approx(expected, rel=1e-9, abs=1e-10), key


def test_the_losses_fall_the_same_way() -> None:
    found = curve()
    assert len(found) == UPDATES == len(GOLDEN["curve"])
    for row, wanted in zip(found, GOLDEN["curve"], strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)
    assert sum(found[-1].values()) < 0.9 * sum(found[0].values())
