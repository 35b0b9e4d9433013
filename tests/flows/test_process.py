"""Commands of a flow: supervisor, exit codes, time limits, the workspace's lock, and DVC."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vlp_models.cli.pipeline import run_lock
from vlp_models.common.workspace import Workspace
from vlp_models.errors import BusyError
from vlp_models.flows.process import (
    Killed,
    PathLocked,
    Preempted,
    StageFailed,
    TimedOut,
    Unreachable,
    WorkspaceInUse,
    hold_workspace,
    is_stale,
    repro,
    run_supervised,
)
from vlp_models.pipeline.dvc.lock_file import repair

ROOT = Path(__file__).parents[2]
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
SLOW = TRAINER.replace("def save(*_):", "def save(*_):\n    time.sleep(2)")
# Holds the workspace and runs a trainer that takes a moment to save.
HOLDER = f"""
import sys
from pathlib import Path
from vlp_models.flows.process import hold_workspace, run_supervised
with hold_workspace(Path("."), "one", 0, print) as lock_fd:
    run_supervised(Path("."), [sys.executable, "-c", {SLOW!r}], print, lock_fd=lock_fd)
"""
SUPERVISE = [sys.executable, "-m", "vlp_models.common.supervise"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def ignore(line: str) -> None:
    pass


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)


def start(tmp_path: Path, code: str, *, through_parent: bool = False, grace: float = 20) -> subprocess.Popen[bytes]:
    """Start the supervisor with a trainer; with `through_parent`, below a process that can be killed."""
    call = f"supervise([sys.executable, '-c', {code!r}], {grace})"
    command = python(f"import sys; from vlp_models.common.supervise import supervise; sys.exit({call})")
    if through_parent:
        command = python(f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)")
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV)
    wait_for(tmp_path / "started")
    return process


def test_supervisor_returns_the_exit_code_of_its_command() -> None:
    assert subprocess.run([*SUPERVISE, "--", *python("raise SystemExit(7)")], cwd=ROOT).returncode == 7


def test_supervisor_starts_nothing_if_its_parent_is_dead_already(tmp_path: Path) -> None:
    command = [*SUPERVISE, "--parent", "1", "--", *python("open('started', 'w')")]
    done = subprocess.run(command, cwd=tmp_path, env=ENV)
    assert done.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "started").exists()


def test_termination_becomes_an_interrupt_and_the_trainer_saves(tmp_path: Path) -> None:
    process = start(tmp_path, TRAINER)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert (tmp_path / "saved").exists()


def test_trainer_saves_when_the_supervisors_parent_dies(tmp_path: Path) -> None:
    process = start(tmp_path, TRAINER, through_parent=True)
    process.kill()
    process.wait()
    wait_for(tmp_path / "saved")


def test_trainer_that_ignores_the_interrupt_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN, grace=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGKILL
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import sys; sys.exit(75)", Preempted),
        ("import sys; sys.exit('ERROR: failed to run: vlp stage pretrain, exited with 75')", Preempted),
        ("import sys; sys.exit('ERROR: pretrain is busy, it is being blocked by (PID 7)')", PathLocked),
        ("import sys; sys.exit('vlp: another `vlp run` (pid 7) is using this workspace; wait')", PathLocked),
        ("import sys; sys.exit('MLflow at http://mlflow: Max retries exceeded with url')", Unreachable),
        ("import sys; sys.exit('ERROR: failed to run: vlp stage register, exited with 69')", Unreachable),
        ("import os; os.kill(os.getpid(), 9)", Killed),
        ("import os; os.kill(os.getppid(), 9)", Killed),  # the supervisor
        ("import sys; sys.exit('ERROR: failed to run: vlp stage pretrain, exited with -9')", Killed),
        ("import sys; sys.exit('disk on fire')", StageFailed),
    ],
)
def test_failures_are_classified_and_carry_the_last_lines(tmp_path: Path, code: str, kind: type[StageFailed]) -> None:
    with pytest.raises(StageFailed) as caught:
        run_supervised(tmp_path, python(code), ignore)
    assert caught.type is kind
    if kind is StageFailed:
        assert str(caught.value).endswith("exited with code 1:\ndisk on fire")


def test_accepted_exit_code_is_an_answer(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = run_supervised(tmp_path, python("print('refused'); exit(3)"), lines.append, accept=(0, 3))
    assert (ended.code, ended.lines, lines) == (3, ["refused"], ["refused"])


def test_part_that_takes_too_long_is_interrupted_and_saves(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"flow\.timeout_hours"):
        run_supervised(tmp_path, python(TRAINER), ignore, timeout=1.5)
    assert (tmp_path / "saved").exists()
    assert time.monotonic() - began < 20


def test_flow_and_vlp_run_never_share_a_workspace(tmp_path: Path) -> None:
    with (
        hold_workspace(tmp_path, "retrain (weekly)", 0, ignore),
        pytest.raises(BusyError, match=r"another flow retrain \(weekly\) \(pid \d+\) is using this workspace"),
        run_lock(Workspace(tmp_path), "run"),
    ):
        pass
    with (  # the first flow's lock is free, and another flow respects the command's
        run_lock(Workspace(tmp_path), "run"),
        pytest.raises(WorkspaceInUse, match=r"another `vlp run` \(pid \d+\) is using this workspace"),
        hold_workspace(tmp_path, "two", 0, ignore),
    ):
        pass


def test_canceled_command_saves_and_leaves_no_output_file(tmp_path: Path) -> None:
    def cancel(line: str) -> None:
        raise KeyboardInterrupt

    talkative = TRAINER.replace('Path("started").write_text("x")', 'print("started", flush=True)')
    with pytest.raises(KeyboardInterrupt):
        run_supervised(tmp_path, python(talkative), cancel)
    assert (tmp_path / "saved").exists() and not list((tmp_path / ".work").glob("part-*.log"))


@pytest.mark.slow
def test_killed_holder_keeps_others_out_until_its_trainer_has_saved(tmp_path: Path) -> None:
    process = subprocess.Popen(python(HOLDER), cwd=tmp_path, env=ENV)
    wait_for(tmp_path / "started")
    process.kill()
    process.wait()
    waits: list[str] = []
    assert list((tmp_path / ".work").glob("part-*.log")), "the killed flow has left the output of its command"
    with hold_workspace(tmp_path, "two", 30, waits.append):
        assert (tmp_path / "saved").exists() and not list((tmp_path / ".work").glob("part-*.log"))
    assert "another flow one (pid" in waits[0]


@pytest.mark.pipeline
def test_repro_runs_stale_stages_once(project: Path) -> None:
    lines: list[str] = []
    assert is_stale(project, ["pretrain@tden"])
    assert repro(project, ["pretrain@tden"], lines.append)
    assert (project / "pretrain-tden").exists()
    assert not (project / "report").exists(), "only the target and its dependencies"
    assert any("pretrain" in line for line in lines)
    assert not is_stale(project, ["pretrain@tden"])
    assert not repro(project, ["pretrain@tden"], lines.append), "nothing ran"


def test_repair_removes_a_damaged_rwlock_and_nothing_else(project: Path) -> None:
    lock = project / ".dvc" / "tmp" / "rwlock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("")  # as a DVC that was killed while writing leaves it
    assert repair(project) == ["removed a damaged .dvc/tmp/rwlock: no DVC process is alive"]
    assert not lock.exists()
    lock.write_text("{}")
    assert repair(project) == []
    assert lock.exists()


FLOW = """
import logging, os, pathlib, subprocess, sys, time
from prefect.logging.configuration import setup_logging
from vlp_models.flows.process import outlive_worker, run_supervised
setup_logging()
outlive_worker()
worker = os.getppid()
print("started", flush=True)
while os.getppid() == worker:
    time.sleep(0.05)
for number in range(200):  # more than two pipes hold
    line = f"{number} " + 1000 * "x"
    print(line, flush=True)
    print(line, file=sys.stderr)
    logging.getLogger("prefect").warning(line)  # rich
    logging.getLogger("other").warning(line)
    os.write(2, line.encode())
subprocess.run(["sh", "-c", "echo from a child; echo and its stderr >&2"], check=True)
run_supervised(pathlib.Path.cwd(), [sys.executable, "-c", "print('trained')"], print)
pathlib.Path("ended").touch()
"""
WORKER = """
import subprocess, sys
pipe = subprocess.PIPE
flow = subprocess.Popen([sys.executable, "flow.py"], stdout=pipe, stderr=pipe, start_new_session=True)
print(flow.pid, flow.stdout.readline().decode().strip(), flush=True)
flow.wait()
"""


@pytest.mark.slow
def test_every_output_of_a_flow_survives_its_worker(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path), "PREFECT__FLOW_RUN_ID": "1"}
    with subprocess.Popen([sys.executable, "-c", WORKER], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pid, started = worker.stdout.readline().split()
        assert started == b"started"
        flow = psutil.Process(int(pid))
        worker.kill()
    psutil.wait_procs([flow], timeout=60)
    assert not flow.is_running() and (tmp_path / "ended").exists()
