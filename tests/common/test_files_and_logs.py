"""Atomic writes, file locks, log lines, and progress without a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models.common import progress
from vlp_models.common.io import atomic_write, output_directory, write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.errors import BusyError


def test_atomic_write_replaces_a_file_only_if_the_block_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.json"
    write_json(file, {"b": 1, "a": "ü"})
    assert file.read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1\n}\n'
    with pytest.raises(KeyboardInterrupt), atomic_write(file, sync=True) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert "ü" in file.read_text(encoding="utf-8")
    assert [path.name for path in file.parent.iterdir()] == ["file.json"]


def test_output_directory_replaces_a_folder_only_if_the_block_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "stale").touch()  # a killed process left it
    with output_directory(folder) as temporary:
        (temporary / "one").touch()
    with pytest.raises(ValueError, match="no"), output_directory(folder) as temporary:
        (temporary / "two").touch()
        raise ValueError("no")
    assert [path.name for path in folder.iterdir()] == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_file_lock_names_its_holder_and_outlives_it_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    holder = rf"another `vlp run` \(pid {os.getpid()}\) is using this workspace"
    with file_lock(path, "`vlp run`") as descriptor:
        with pytest.raises(BusyError, match=holder), file_lock(path, "`vlp forget`"):
            pass
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor], text=True
        )
    messages: list[str] = []
    with pytest.raises(BusyError), file_lock(path, "`vlp forget`", wait=0.1, on_wait=messages.append):
        pass
    assert "waiting up to 0 s for another `vlp run`" in messages[0]
    child.communicate("\n")
    with file_lock(path, "`vlp forget`"):
        pass


def test_log_lines_go_to_stderr_and_warnings_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger("flows.x")
    assert logger.name == "vlp_models.flows.x"
    logger.info("one")
    logger.warning("two")
    assert capsys.readouterr() == ("", "one\nwarning: two\n")


def test_progress_is_a_line_now_and_then_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    with progress.progress_bar("detector", 6, "steps") as bar:
        for _ in range(6):
            bar.advance("loss 0.5")
    assert "detector  3/6 steps  loss 0.5" in capsys.readouterr().err
