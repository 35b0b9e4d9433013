"""TDEN computes what it did before its tokens were packed and its variants had files of their own.

tests/golden/golden_tden.json was recorded by that earlier code, on the same weights and inputs (tests/golden_tden.py).
For the public code's switches it gave what the public code itself gives, to 4e-6 in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_tden import SIZES, TINY, VARIANTS, numbers

from vlp_models.models import DataFacts, build_model

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_tden.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_those_of_the_padded_model(name: str) -> None:
    model = build_model("tden", {**TINY, **VARIANTS[name]}, DataFacts(mask_id=4, **SIZES))
    found = numbers(model, dict.fromkeys(model.objectives), lambda loss: loss.mean)
    assert found.keys() == GOLDEN[name].keys()
    for key, expected in GOLDEN[name].items():
        if key == "beams":
            assert found[key] == expected
        else:
            assert found[key] == pytest.approx(expected, rel=1e-9, abs=1e-10), key


def test_the_recorded_numbers_differ_from_variant_to_variant() -> None:
    losses = {name: tuple(v for k, v in row.items() if "pass" in k) for name, row in GOLDEN.items()}
    distinct = {name for name in losses if name not in ("public VQA", "public VCR")}  # pretraining is the same there
    assert len({losses[name] for name in distinct}) == len(distinct)
