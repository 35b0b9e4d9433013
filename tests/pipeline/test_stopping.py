"""A stage that is stopped announces it at once and ends soon, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from vlp_models.training.resume import CooperativeStop

ROOT = Path(__file__).parents[2]
GUARDED = """
import os, signal, sys, time
from pathlib import Path
from vlp_models.common.executors import LocalMapper
from vlp_models.common.workspace import Workspace
from vlp_models.common import supervise
from vlp_models.pipeline.guard import guarded
supervise.LOOK_EVERY = 0.3
if __name__ == "__main__":
    with guarded(Workspace(Path.cwd()), "features"):
        print("ready", flush=True)
        {block}
"""
STOPPED = """
        import subprocess
        child = subprocess.Popen(["sleep", "2"])
        child.send_signal(signal.SIGSTOP)
        print("stopped", flush=True)
        sys.exit(-child.wait())
"""
SWALLOWED = """
        try:
            time.sleep(60)
        except BaseException:
            raise ValueError("a library's own error")
"""


def start(folder: Path, block: str) -> subprocess.Popen[str]:
    (folder / "stage.py").write_text(GUARDED.format(block=block.strip()))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "stage.py"], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def stop(process: subprocess.Popen[str], number: int) -> tuple[str, float]:
    """Send the signal; return the first line on stderr, and the seconds until the process ended."""
    sent = time.monotonic()
    process.send_signal(number)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert time.monotonic() - sent < 5, "nothing is announced"
    process.wait(30)
    return first, time.monotonic() - sent


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_worker_processes_do_not_finish_their_chunks(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "list(LocalMapper(2).map(time.sleep, [60] * 4))")
    while len(workers := [p for p in psutil.Process(process.pid).children() if "spawn_main" in str(p.cmdline())]) < 2:
        time.sleep(0.1)
    first, seconds = stop(process, number)
    assert first == "features: stopping\n"
    assert seconds < 10 and process.returncode in (128 + 15, -signal.SIGINT)
    psutil.wait_procs(workers, timeout=10)
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
def test_a_stop_that_a_library_turns_into_its_own_error_is_still_a_stop(tmp_path: Path) -> None:
    process = start(tmp_path, SWALLOWED)
    first, seconds = stop(process, signal.SIGTERM)
    assert first == "features: stopping\n" and seconds < 10
    assert process.returncode == 128 + signal.SIGTERM
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_stopped_process_below_the_stage_is_killed_and_nothing_waits_for_it(tmp_path: Path) -> None:
    process = start(tmp_path, STOPPED)
    assert process.wait(30) == signal.SIGKILL
    assert process.stderr is not None and "(sleep) was stopped by a signal and is killed" in process.stderr.read()


@pytest.mark.slow
def test_a_stage_that_is_stopped_with_its_processes_continues_with_them(tmp_path: Path) -> None:
    process = start(tmp_path, STOPPED)
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than a process may be stopped while the stage runs
    (child,) = psutil.Process(process.pid).children()
    child.resume()
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0


def test_training_announces_that_it_stops_once(capfd: pytest.CaptureFixture[str]) -> None:
    points: Any = None
    callback = CooperativeStop(points)
    callback._request_stop(signal.SIGTERM, None)
    callback._request_stop(signal.SIGTERM, None)
    assert capfd.readouterr().err == "stopping after the current update, which is saved\n"
