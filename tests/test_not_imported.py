"""`vlp run` says what to import where a model's first weights are not there; DVC names only a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli import pipeline
from vlp_models.cli.presets import apply_overlay

ROOT = Path(__file__).parent.parent
HINT = "`vlp import-checkpoint` makes it, and `--name resnet` gives it that place"


def test_first_weights_that_are_missing_are_named_with_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    apply_overlay(tmp_path / "params.yaml", None, ["models.tden.init=checkpoints/imported/resnet"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "write_plan", lambda: False)
    monkeypatch.setattr(pipeline, "_run_supervised", lambda wanted, env: 1)
    assert pipeline.run_pipeline(["initial@tden"]) == 1
    said = capsys.readouterr().err
    assert "`models.tden.init`: checkpoints/imported/resnet not found" in said and HINT in said
    (tmp_path / "checkpoints" / "imported" / "resnet").mkdir(parents=True)
    assert pipeline.run_pipeline(["initial@tden"]) == 1
    assert HINT not in capsys.readouterr().err
