"""VLMo and SOHO learn what they did when tests/golden/golden_pixel_curves.json was recorded."""

from __future__ import annotations

import json

import pytest
from golden_pixel_curves import FILE, MODELS, UPDATES, curve

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("family", MODELS)
def test_the_losses_fall_the_same_way(family: str) -> None:
    found = curve(family)
    assert len(found) == UPDATES == len(GOLDEN[family])
    for row, wanted in zip(found, GOLDEN[family], strict=True):
        assert row == pytest.approx(wanted, rel=1e-7)
    first, last = (sum(sum(row.values()) for row in rows) for rows in (found[:3], found[-3:]))
    assert last < first
