"""`vlp run` puts back what MLflow has lost; test_pipeline.py does it with the real pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli import pipeline
from vlp_models.errors import TrackingError
from vlp_models.registry import receipts as registered

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("gone", "targets", "code", "again"),
    [
        (["vlp-vqa/1"], [], 0, True),
        (["vlp-vqa/1"], ["register"], 0, True),
        (["vlp-vqa/1"], ["evaluate"], 0, False),
        (["vlp-vqa/1"], [], 1, False),
        ([], [], 0, False),
        (None, [], 0, False),
    ],
)
def test_register_runs_again_only_where_something_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    gone: list[str] | None,
    targets: list[str],
    code: int,
    again: bool,
) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []

    def lost(params: Any, root: Path) -> list[str]:
        if gone is None:
            raise TrackingError("MLflow does not answer")
        return gone

    monkeypatch.setattr(registered, "lost", lost)
    monkeypatch.setattr(pipeline, "write_plan", lambda: False)
    monkeypatch.setattr(pipeline, "_run_dvc", lambda params, workspace, targets: code)
    monkeypatch.setattr(pipeline, "_run_supervised", lambda wanted, env: ran.extend(wanted) or 0)
    assert pipeline.run_pipeline(targets) == code
    assert [command[-4:] for command in ran] == ([["repro", "--force", "--single-item", "register"]] if again else [])
    said = capsys.readouterr().err
    assert ("MLflow has lost vlp-vqa/1; registering again" in said) == again
    assert ("is not known" in said) == (gone is None), "a server that is away stops no run that is done"
