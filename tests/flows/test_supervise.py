"""A trainer is told to stop, whatever happens to the processes above it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Saves its state when interrupted, as a trainer does, and exits with 75.
TRAINER = """
import signal, sys, time
from pathlib import Path
def save(*_):
    Path("saved").write_text("state")
    sys.exit(75)
signal.signal(signal.SIGINT, save)
Path("started").write_text("x")
time.sleep(60)
"""
STUBBORN = TRAINER.replace("def save(*_):", "def save(*_):\n    return")


def start(tmp_path: Path, code: str, *, through_shell: bool = False, grace: float = 20) -> subprocess.Popen[bytes]:
    """The supervisor over a trainer; with `through_shell`, below a parent that can be killed."""
    call = f"supervise([sys.executable, '-c', {code!r}], {grace})"
    run = f"import sys; from flows.supervise import supervise; sys.exit({call})"
    command = [sys.executable, "-c", run]
    if through_shell:
        parent = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
        command = [sys.executable, "-c", parent]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for(tmp_path / "started")
    return process


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)


def test_exit_code_passes_through(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.supervise", "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, cwd=ROOT).returncode == 7


def test_a_parent_that_died_before_the_start_starts_nothing(tmp_path: Path) -> None:
    code = "open('started', 'w')"
    command = [sys.executable, "-m", "flows.supervise", "--parent", "1", "--", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "started").exists()


def test_termination_becomes_an_interrupt_and_the_state_is_saved(tmp_path: Path) -> None:
    process = start(tmp_path, TRAINER)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert (tmp_path / "saved").exists()


def test_death_of_the_parent_stops_the_trainer_in_order(tmp_path: Path) -> None:
    process = start(tmp_path, TRAINER, through_shell=True)
    process.kill()
    process.wait()
    wait_for(tmp_path / "saved")


def test_a_trainer_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN, grace=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGKILL
    assert not (tmp_path / "saved").exists()
