"""Commands under a supervisor: signals reach all that run, and the handlers from before return."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vlp_models.common.environment import command_environment
from vlp_models.common.supervise import supervise_commands

# Ends with 255 when it is interrupted, as DVC does.
WAITS = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(255)
"""


def test_first_failure_is_returned_and_starts_nothing_more(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", "raise SystemExit(7)"], [sys.executable, "-c", WAITS, str(tmp_path / "started")]]
    assert supervise_commands(commands, command_environment()) == 7
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_commands_and_the_next_one_is_not_swallowed(tmp_path: Path, number: signal.Signals) -> None:
    """The exit code is that of the signal, so `vlp run` does not go on with the next command."""
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    names = [tmp_path / str(number) for number in range(3)]

    def interrupt() -> None:
        while not all(name.exists() for name in names[:2]):
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    commands = [[sys.executable, "-c", WAITS, str(name)] for name in names]
    assert supervise_commands(commands, command_environment(), at_once=2) == 128 + number
    thread.join()
    assert not names[2].exists(), "no further command starts"
    assert {which: signal.getsignal(which) for which in before} == before


@pytest.mark.slow
def test_a_command_that_stays_stopped_is_reported_with_the_way_out() -> None:
    """It is not killed: a user may have paused it."""
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    code = f"""
import sys
from vlp_models.common import supervise
supervise.LOOK_EVERY = 0.1
sys.exit(supervise.supervise([sys.executable, "-c", {stopped!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    sentence = process.stderr.readline()
    way_out = re.search(r"is stopped by a signal; `(kill -CONT \d+)` continues it", sentence)
    assert way_out, sentence
    subprocess.run(way_out[1].split(), check=True)
    assert process.wait(30) == 0
