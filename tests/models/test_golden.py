"""Every family computes the numbers recorded in tests/golden/, on weights and inputs that are formulas.

They were recorded by models that the other tests of this folder compare with the papers' formulas; TDEN's before its
tokens were packed. With the switches of the authors' code they agree with that code to 4e-6 in float32.
`python tests/support/golden_FAMILY.py` records a file again; do so only after a deliberate change of what a model
computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_pixel_curves
import golden_soho
import golden_tden
import golden_unified_vlp
import golden_vlmo
import golden_xgpt
import pytest
from toy_dataset import make_toy

from vlp_models.models import DataFacts, build_model

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN: dict[str, Any] = {
    name: json.loads((FOLDER / f"golden_{name}.json").read_text())
    for name in ("tden", "unified_vlp", "xgpt", "vlmo", "soho", "pixel_curves")
}
EXACT = {"beams"}  # token ids


def tden(name: str) -> dict[str, Any]:
    config = {**golden_tden.TINY, **golden_tden.VARIANTS[name]}
    model: Any = build_model("tden", config, DataFacts(mask_id=4, **golden_tden.SIZES))
    return golden_tden.numbers(model, dict.fromkeys(model.objectives), lambda loss: loss.mean)


def vlmo(name: str) -> dict[str, Any]:
    config = {**golden_vlmo.TINY, **golden_vlmo.VARIANTS[name]}
    return golden_vlmo.numbers(build_model("vlmo", config, DataFacts(**golden_vlmo.SIZES)))


NUMBERS: dict[str, Any] = {
    "tden": tden,
    "unified_vlp": golden_unified_vlp.numbers,
    "xgpt": golden_xgpt.numbers,
    "vlmo": vlmo,
    "soho": golden_soho.numbers,
}
MODULES = (golden_tden, golden_unified_vlp, golden_xgpt, golden_vlmo, golden_soho)


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family, module in zip(NUMBERS, MODULES, strict=True) for name in module.VARIANTS],
)
def test_numbers(family: str, name: str) -> None:
    found, golden = NUMBERS[family](name), GOLDEN[family]
    expected = golden["numbers"][name] if family == "unified_vlp" else golden[name]
    rel, abs = (1e-7, 1e-9) if family == "soho" else (1e-9, 1e-10)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (value if key in EXACT else pytest.approx(value, rel=rel, abs=abs)), key


def test_unified_vlp_curve() -> None:
    found, golden = golden_unified_vlp.curve(), GOLDEN["unified_vlp"]["curve"]
    assert len(found) == golden_unified_vlp.UPDATES == len(golden)
    for row, expected in zip(found, golden, strict=True):
        assert row == pytest.approx(expected, rel=1e-9)
    assert sum(found[-1].values()) < 0.9 * sum(found[0].values())


def test_xgpt_curve(tmp_path: Path) -> None:
    rows, golden = golden_xgpt.curve(make_toy(tmp_path), tmp_path / "work"), GOLDEN["xgpt"]["curve"]
    assert len(rows) == len(golden) == 60
    for row, expected in zip(rows, golden, strict=True):
        assert row == pytest.approx(expected, rel=2e-5, abs=1e-6), row["step"]


@pytest.mark.parametrize("family", golden_pixel_curves.MODELS)
def test_pixel_curves(family: str) -> None:
    found, golden = golden_pixel_curves.curve(family), GOLDEN["pixel_curves"][family]
    assert len(found) == golden_pixel_curves.UPDATES == len(golden)
    for row, expected in zip(found, golden, strict=True):
        assert row == pytest.approx(expected, rel=1e-7)
    first, last = (sum(sum(row.values()) for row in rows) for rows in (found[:3], found[-3:]))
    assert last < first
