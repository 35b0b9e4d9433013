"""`vlp up` and `vlp down` where another program has the port, a deployment is missing, or a process has just ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from vlp_models.cli import stack as stack_module
from vlp_models.cli.stack import Stack, print_next, stop, stop_orphaned_runs
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
    monkeypatch.setattr(ended, "info", {"cmdline": ["prefect.engine"]}, raising=False)
    monkeypatch.setattr(ended, "environ", lambda: {"PREFECT_HOME": home})
    processes: Any = lambda names: [ended]  # noqa: E731
    monkeypatch.setattr(stack_module.psutil, "process_iter", processes)
    assert stop_orphaned_runs(stack) == 1
