"""A training on the tiny dataset gives its recorded curve, bit by bit.

One micro-batch an update, all objectives summed, no dropout (whose numbers depend on how a model lays out its tokens):
nothing that was changed on purpose shows there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_dataset import Toy, untimed

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_training_curves.json").read_text())


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "optimizer", "close"),
    # Muon's iteration was in bfloat16 and is in float32 here.
    [("adamw", {}, 2e-5), ("muon", {"muon_lr": 3e-3, "muon_dtype": "float32"}, 5e-4)],
)
def test_golden_curve_is_unchanged(toy: Toy, tmp_path: Path, name: str, optimizer: dict, close: float) -> None:
    _, result = toy.fit(tmp_path, toy.model(dropout=0.0, attention_dropout=0.0), optimizer=optimizer)
    for row, wanted in zip(untimed(result.rows), GOLDEN[name], strict=True):
        exact = {key: value for key, value in wanted.items() if name == "adamw" or not key.endswith("accuracy")}
        assert {key: row[key] for key in exact} == pytest.approx(exact, rel=close, abs=1e-6), row["step"]
