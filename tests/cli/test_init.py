"""`vlp init` in the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp_models.cli import project


def test_the_current_folder_becomes_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    inode = folder.stat().st_ino
    project.init(Path(), template="scenes")
    assert (folder / "params.yaml").is_file() and (folder / ".git").is_dir()
    assert folder.stat().st_ino == inode, "the shell that is in it stays in it"
    assert list(tmp_path.iterdir()) == [folder] and "  cd " not in capsys.readouterr().out
