"""XGPT computes what it computed when its formulas were first checked: tests/golden/golden_xgpt.json.

`python tests/models/test_golden_xgpt.py` writes the file anew, which only a change of the model's meaning may ask for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden_xgpt import VARIANTS, numbers
from tiny_xgpt import toy_xgpt
from toy_dataset import Toy, make_toy, untimed

FILE = Path(__file__).parents[1] / "golden" / "golden_xgpt.json"


def curve(toy: Toy, work: Path) -> list[dict[str, Any]]:
    """Two epochs of turns on one batch each, inverse square root, without dropout, whose numbers depend on layout."""
    model = toy_xgpt(toy.tokenizer.vocab_size, dropout=0.0, attention_dropout=0.0)
    shares = {"ic": 2.0, "imlm": 1.0, "ida": 1.0, "tifg": 1.0}
    optimizer = {"schedule": "inverse_sqrt", "min_lr": 2e-4, "betas": [0.9, 0.98]}
    _, result = toy.fit(work, model, objectives=shares, mix="alternate", reuse_batch=True, optimizer=optimizer)
    return untimed(result.rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_the_recorded_ones(name: str) -> None:
    golden, found = json.loads(FILE.read_text())[name], numbers(name)
    assert found.keys() == golden.keys()
    for key, expected in golden.items():
        assert found[key] == (expected if key == "beams" else pytest.approx(expected, rel=1e-9, abs=1e-10)), key


def test_the_recorded_numbers_differ_from_variant_to_variant() -> None:
    golden = json.loads(FILE.read_text())
    assert len({golden[name]["norm of the gradient"] for name in VARIANTS}) == len(VARIANTS)


def test_the_curve_is_the_recorded_one(tmp_path: Path) -> None:
    rows, golden = curve(make_toy(tmp_path), tmp_path / "work"), json.loads(FILE.read_text())["curve"]
    assert len(rows) == len(golden) == 60
    for row, wanted in zip(rows, golden, strict=True):
        assert row == pytest.approx(wanted, rel=2e-5, abs=1e-6), row["step"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded: dict[str, Any] = {name: numbers(name) for name in VARIANTS}
        recorded["curve"] = curve(make_toy(Path(folder)), Path(folder) / "work")
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
