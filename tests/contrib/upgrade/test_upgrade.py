"""`vlp upgrade`: files that the project had before the template, that it deleted, or that the template dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp_models.cli import project
from vlp_models.contrib.upgrade import commands
from vlp_models.errors import DataError


def test_an_upgrade_keeps_a_file_that_the_project_had_before_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.init(tmp_path / "mine", template="scenes")
    monkeypatch.chdir(tmp_path / "mine")
    known = project.template_files()
    for name, text in (("flows/report.py", "THEIRS = 1\n"), ("flows/same.py", "SAME = 1\n")):
        (tmp_path / Path(name).name).write_text(text)
        known[name] = tmp_path / Path(name).name
    monkeypatch.setattr(commands, "template_files", lambda: known)
    Path("flows/report.py").write_text("MINE = 1\n")
    Path("flows/same.py").write_text("SAME = 1\n")
    with pytest.raises(DataError, match=r"^flows/report\.py: your edits and the template's meet"):
        commands.upgrade(apply=True)
    both = Path("flows/report.py").read_text()
    assert "MINE = 1" in both and "THEIRS = 1" in both and "<<<<<<< yours" in both
    assert Path("flows/same.py").read_text() == "SAME = 1\n"


def test_an_upgrade_keeps_deleted_files_deleted_and_reports_those_that_the_template_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.init(tmp_path / "mine", template="scenes")
    monkeypatch.chdir(tmp_path / "mine")
    deleted, dropped = "prefect.yaml", "deploy/zombie.yaml"
    files = {name: path for name, path in project.template_files().items() if name != dropped}
    (tmp_path / "new.yaml").write_text("new: 1\n")
    files |= {deleted: tmp_path / "new.yaml", "flows/new.yaml": tmp_path / "new.yaml"}
    monkeypatch.setattr(commands, "template_files", lambda: files)
    Path(deleted).unlink()
    capsys.readouterr()
    for apply in (False, True):
        commands.upgrade(apply=apply)
        shown = capsys.readouterr().out
        assert f"{deleted}: deleted in this project" in shown and f"{deleted} (new template)" not in shown
        assert f"{dropped}: no longer in the template" in shown
    assert not Path(deleted).exists() and Path(dropped).exists() and Path("flows/new.yaml").exists()
    commands.upgrade(apply=True)
    assert capsys.readouterr().out.endswith("changes nothing in this project\n"), "reported once"
