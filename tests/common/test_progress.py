"""Long work speaks where there is no terminal, too."""

from __future__ import annotations

import pytest

from vlp_models.common import progress


def test_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with progress.progress_bar("detector", 6, "steps") as bar:
        for _ in range(6):
            bar.advance("loss 0.5")
    assert "detector  3/6 steps  loss 0.5" in capsys.readouterr().err
