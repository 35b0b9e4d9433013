"""VLMo computes what it did when it was first written; tests/models/test_vlmo.py says why that is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_vlmo import SIZES, TINY, VARIANTS, numbers

from vlp_models.models import DataFacts, build_model

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vlmo.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_the_recorded_ones(name: str) -> None:
    found = numbers(build_model("vlmo", {**TINY, **VARIANTS[name]}, DataFacts(**SIZES)))
    assert found.keys() == GOLDEN[name].keys()
    for key, expected in GOLDEN[name].items():
        assert found[key] == pytest.approx(expected, rel=1e-9, abs=1e-10), key


def test_the_recorded_numbers_differ_from_variant_to_variant() -> None:
    assert len({(row["itc"], tuple(row["fused"])) for row in GOLDEN.values()}) == len(VARIANTS)
