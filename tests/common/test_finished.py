"""A stage's result, kept until DVC has recorded it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.pipeline.unrecorded import RECORD, keep, restore


@pytest.mark.parametrize("left", [None, "", "{}", "[]", '{"files": 3, "recorded": ""}'])
def test_a_damaged_record_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None) -> None:
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    workspace = Workspace(tmp_path)
    work, output = workspace.work("tokenizer", "0123"), tmp_path / "data" / "vocab.txt"
    output.parent.mkdir()
    output.write_text("a\nb\n")
    keep(workspace, work, "tokenizer", [output])
    output.unlink()
    if left is not None:
        (work / RECORD).write_text(left)
    assert restore(workspace, work, "tokenizer") == output.exists() == (left is None)
    assert left is None or not (work / RECORD).exists()
