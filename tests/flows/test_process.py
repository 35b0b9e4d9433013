"""How a flow runs a command: what it makes of an exit code, of too much time, and of its own end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from flows.process import Preempted, StageFailed, TimedOut, Unreachable, WorkspaceBusy, supervised


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import sys; sys.exit(75)", Preempted),
        ("import sys; sys.exit('ERROR: failed to run: vlp stage pretrain, exited with 75')", Preempted),
        ("import sys; sys.exit('ERROR: pretrain is busy, it is being blocked by (PID 7)')", WorkspaceBusy),
        ("import sys; sys.exit('MLflow at http://mlflow: Max retries exceeded with url')", Unreachable),
        ("import sys; sys.exit('ERROR: failed to run: vlp stage register, exited with 69')", Unreachable),
        ("import sys; sys.exit('disk on fire')", StageFailed),
    ],
)
def test_failures_are_told_apart_and_carry_the_last_lines(tmp_path: Path, code: str, kind: type[StageFailed]) -> None:
    with pytest.raises(StageFailed) as caught:
        supervised(tmp_path, command(code), lambda line: None)
    assert caught.type is kind
    if kind is StageFailed:
        assert str(caught.value).endswith("ended with 1:\ndisk on fire")


def test_an_accepted_exit_code_is_an_answer(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = supervised(tmp_path, command("print('refused'); exit(3)"), lines.append, accept=(0, 3))
    assert (ended.code, ended.lines, lines) == (3, ["refused"], ["refused"])


def test_a_part_that_takes_too_long_is_interrupted_and_saves(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGINT, save)
time.sleep(60)
"""
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"flow\.timeout_hours"):
        supervised(tmp_path, command(code), lambda line: None, timeout=1.5)
    assert (tmp_path / "saved").exists()
    assert time.monotonic() - began < 20
