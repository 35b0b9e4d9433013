"""`vlp up`, `vlp down` and `vlp status` without a server: answers of other programs, ended processes, schedules."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from vlp_models.cli.status import status
from vlp_models.common.io import read_json
from vlp_models.contrib.stack.commands import (
    TO_RESUME,
    print_next,
    register_deployments,
    resume_schedules,
    stop,
    stop_orphaned_runs,
)
from vlp_models.contrib.stack.processes import RUN_ID, Stack
from vlp_models.errors import DataError


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    made = Stack(tmp_path)
    made.folder.mkdir(parents=True)
    return made


@pytest.fixture
def ended() -> psutil.Process:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        child.communicate(b"\n")
    return process


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ht>", b"SSH-2.0-x\r\n"], ids=["HTML", "no HTTP"]
)
def test_an_answer_of_another_program_is_an_error_in_one_line(stack: Stack, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        stack.record["port"] = server.getsockname()[1]
        with pytest.raises(DataError, match="Prefect's server does not answer"):
            stack.call("/health")
        assert not stack.is_healthy()


def test_without_the_weekly_deployment_there_is_nothing_to_resume(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack, "call", lambda path: None)  # 404
    print_next(stack)
    shown = capsys.readouterr().out
    assert "PREFECT_API_URL" in shown and "vlp down" in shown and "retrain/weekly" not in shown


def test_processes_that_have_just_ended_are_stopped(
    stack: Stack, ended: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.record["worker"] = {"pid": ended.pid, "started": 0}
    assert stop(stack, "worker", ended) == f"stopped (pid {ended.pid})"
    # A flow that ends after it was listed.
    home = stack.environment()["PREFECT_HOME"]
    monkeypatch.setattr(ended, "environ", lambda: {"PREFECT_HOME": home, RUN_ID: "1"})
    processes: Any = lambda: [ended]  # noqa: E731
    monkeypatch.setattr(psutil, "process_iter", processes)
    assert stop_orphaned_runs(stack) == 1


def test_a_damaged_record_is_a_note_of_the_status(stack: Stack) -> None:
    (stack.root / "params.yaml").touch()
    (stack.folder / "record.json").write_text("[]")
    assert any("record.json: damaged" in note for note in status(stack.root).notes)


class Killed(BaseException):
    """Nothing runs after it."""


class Server(Stack):
    """A stack whose `prefect deploy` pauses the first deployment, as Prefect does, and then fails."""

    def __init__(self, root: Path, failure: BaseException | None) -> None:
        super().__init__(root)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failure = failure
        self.active = {"weekly": True, "model": False}

    def prefect(self, *arguments: str) -> None:
        assert arguments == ("deploy", "--all")
        self.active["weekly"] = False
        if self.failure is not None:
            raise self.failure

    def call(self, path: str, body: Any = None, method: str = "", timeout: float = 60) -> Any:
        if path == "/deployments/filter":
            return [
                {"id": name, "schedules": [{"id": f"{name}-schedule", "active": active}]}
                for name, active in self.active.items()
            ]
        _, _, name, _, schedule = path.split("/")
        assert (schedule, method, body) == (f"{name}-schedule", "PATCH", {"active": True})
        self.active[name] = True
        return None


@pytest.mark.parametrize("failure", [None, DataError("`prefect deploy --all` failed"), KeyboardInterrupt()])
def test_active_schedules_stay_active_if_a_later_deployment_fails(
    tmp_path: Path, failure: BaseException | None
) -> None:
    server = Server(tmp_path, failure)
    if failure is None:
        register_deployments(server)
    else:
        with pytest.raises(type(failure)):
            register_deployments(server)
    assert server.active == {"weekly": True, "model": False}
    assert TO_RESUME not in read_json(server.folder / "record.json")


def test_schedules_paused_by_a_killed_call_are_resumed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Server(tmp_path, Killed())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("vlp_models.contrib.stack.commands.resume_schedules", lambda stack: None)
        register_deployments(killed)
    assert killed.active["weekly"] is False and read_json(killed.folder / "record.json")[TO_RESUME] == ["weekly"]

    again = Server(tmp_path, None)
    again.active = dict(killed.active)
    register_deployments(again)
    assert again.active == {"weekly": True, "model": False} and TO_RESUME not in again.record

    again.save(**{TO_RESUME: ["weekly", "deleted"]})
    again.active["weekly"] = False
    resume_schedules(again)
    assert again.active == {"weekly": True, "model": False} and TO_RESUME not in again.record
