"""Two flows in one workspace: the second waits or is told who is there; a dead holder leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.lock import WorkspaceHeld, hold_workspace

ROOT = Path(__file__).parent.parent.parent
# Holds the workspace over a trainer that needs a moment to save.
HOLDER = """
import sys
from pathlib import Path
from flows.lock import hold_workspace
from flows.process import supervised
trainer = '''
import pathlib, signal, sys, time
def save(*_):
    time.sleep(2)
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGINT, save)
pathlib.Path("started").touch()
time.sleep(60)
'''
with hold_workspace(Path("."), "the first flow", 0, print) as hold:
    supervised(Path("."), [sys.executable, "-c", trainer], print, hold=hold)
"""


def quiet(line: str) -> None:
    pass


def test_the_second_is_told_who_works_here_and_the_lock_is_free_afterwards(tmp_path: Path) -> None:
    who = rf"retrain \(retrain\) \(process {os.getpid()} on .* works in"
    with (
        hold_workspace(tmp_path, "retrain (retrain)", 0, quiet),
        pytest.raises(WorkspaceHeld, match=who),
        hold_workspace(tmp_path, "another", 0, quiet),
    ):
        pass
    with hold_workspace(tmp_path, "another", 0, quiet):
        pass


def test_a_killed_holder_keeps_others_out_until_its_trainer_has_saved(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=tmp_path, env=env)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    waited: list[str] = []
    with hold_workspace(tmp_path, "the second flow", 30, waited.append):
        assert (tmp_path / "saved").exists()
    assert "the first flow" in waited[0]
