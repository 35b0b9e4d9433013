"""Every family computes the numbers recorded in tests/golden/, on weights and inputs that are formulas.

They were recorded by models that the other tests of this folder compare with the papers' formulas; TDEN's before its
tokens were packed. With the switches of the authors' code they agree with that code to 4e-6 in float32.
`python tests/golden_FAMILY.py` records a file again; do so only after a deliberate change of a model's computation.
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


def check(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-9, abs: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (value if key in EXACT else pytest.approx(value, rel=rel, abs=abs)), key


@pytest.mark.parametrize("name", golden_tden.VARIANTS)
def test_tden(name: str) -> None:
    config = {**golden_tden.TINY, **golden_tden.VARIANTS[name]}
    model: Any = build_model("tden", config, DataFacts(mask_id=4, **golden_tden.SIZES))
    found = golden_tden.numbers(model, dict.fromkeys(model.objectives), lambda loss: loss.mean)
    check(found, GOLDEN["tden"][name])


@pytest.mark.parametrize("name", golden_unified_vlp.VARIANTS)
def test_unified_vlp(name: str) -> None:
    check(golden_unified_vlp.numbers(name), GOLDEN["unified_vlp"]["numbers"][name])


@pytest.mark.parametrize("name", golden_xgpt.VARIANTS)
def test_xgpt(name: str) -> None:
    check(golden_xgpt.numbers(name), GOLDEN["xgpt"][name])


@pytest.mark.parametrize("name", golden_vlmo.VARIANTS)
def test_vlmo(name: str) -> None:
    config = {**golden_vlmo.TINY, **golden_vlmo.VARIANTS[name]}
    check(golden_vlmo.numbers(build_model("vlmo", config, DataFacts(**golden_vlmo.SIZES))), GOLDEN["vlmo"][name])


@pytest.mark.parametrize("name", golden_soho.VARIANTS)
def test_soho(name: str) -> None:
    check(golden_soho.numbers(name), GOLDEN["soho"][name], rel=1e-7, abs=1e-9)


def test_recorded_numbers_differ_between_variants() -> None:
    """A variant that computed the same as another would test nothing."""
    tden = {name: tuple(v for k, v in row.items() if "pass" in k) for name, row in GOLDEN["tden"].items()}
    distinct = tden.keys() - {"public VQA", "public VCR"}  # pretraining is the same in these
    assert len({tden[name] for name in distinct}) == len(distinct)
    xgpt = [GOLDEN["xgpt"][name]["norm of the gradient"] for name in golden_xgpt.VARIANTS]
    assert len(set(xgpt)) == len(xgpt)
    assert len({(row["itc"], tuple(row["fused"])) for row in GOLDEN["vlmo"].values()}) == len(golden_vlmo.VARIANTS)
    soho = GOLDEN["soho"]
    assert soho["paper"]["mlm"] != soho["released update"]["mlm"] != soho["public code"]["mlm"]
    assert soho["paper"]["codes"] != soho["released update"]["codes"]
    assert soho["paper"]["fused"] != soho["tasks on codes"]["fused"]


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
