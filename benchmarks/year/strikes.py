"""The faults of the year: each strikes while a week's flow runs, or before it, and a person repairs what needs one.

`strike(stack, chance)` returns after the fault; `repair(stack)` is what a person does when the flow has ended.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from services import DATA_KEY
from stack import Stack

MOMENTS = ("validate", "features", "finetune tden-captioning", "evaluate tden-captioning", "register")


def nothing(stack: Stack, chance: random.Random) -> None:
    """Do nothing."""


def repaired(stack: Stack) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Fault:
    """before: strikes before the flow starts. during: strikes while it runs. repair: after it has ended.

    reported: words of which one is in the message about the fault; none: the flow completes, and nobody need act.
    """

    before: Callable[[Stack, random.Random], None] = nothing
    during: Callable[[Stack, random.Random], None] = nothing
    repair: Callable[[Stack], None] = repaired
    reported: tuple[str, ...] = ()


def wait_for_stage(stack: Stack, chance: random.Random) -> str:
    """Wait until a stage drawn by chance runs, then up to two seconds; return its name, empty if it never came."""
    wanted, deadline = chance.choice(MOMENTS), time.monotonic() + 600
    while time.monotonic() < deadline:
        if stack.stage() == wanted:
            time.sleep(2 * chance.random())
            return wanted
        time.sleep(0.05)
    return ""


def kill_part(name: str) -> Callable[[Stack, random.Random], None]:
    def strike(stack: Stack, chance: random.Random) -> None:
        wait_for_stage(stack, chance)
        if process := stack.part(name):
            process.kill()

    return strike


def kill_database(stack: Stack, chance: random.Random) -> None:
    """Kill PostgreSQL; its service manager starts it again after 20 seconds."""
    wait_for_stage(stack, chance)
    stack.database.stop(signal.SIGKILL)
    time.sleep(20)
    stack.database.start()


def kill_machine(stack: Stack, chance: random.Random) -> None:
    """Kill everything, then do what happens after a boot: the services start, and cron runs `vlp up`."""
    wait_for_stage(stack, chance)
    stack.kill_everything()
    stack.start_services()
    stack.up()


def fill_disk(stack: Stack, chance: random.Random) -> None:
    """Leave 4 MB of the project's disk."""
    statistics = psutil.disk_usage(str(stack.disk))
    subprocess.run(["fallocate", "-l", str(statistics.free - (4 << 20)), stack.disk / "ballast"], check=True)


def free_disk(stack: Stack) -> None:
    (stack.disk / "ballast").unlink(missing_ok=True)


def stop_bucket(stack: Stack, chance: random.Random) -> None:
    stack.bucket.stop()


def start_bucket(stack: Stack) -> None:
    stack.bucket.start()


def expire_key(stack: Stack, chance: random.Random) -> None:
    """Give the bucket of DVC's remote another key; the project still has the old one."""
    key = ("data", f"secret-{chance.random()}")
    (stack.work / "data-key.json").write_text(json.dumps(key))
    stack.bucket.write_keys(key)
    stack.bucket.stop()
    stack.bucket.start()


def renew_key(stack: Stack) -> None:
    stack.use_data_key(stack.project, *data_key(stack))


def data_key(stack: Stack) -> tuple[str, str]:
    file = stack.work / "data-key.json"
    return tuple(json.loads(file.read_text())) if file.exists() else DATA_KEY


def jump(stack: Stack, chance: random.Random) -> None:
    """From some seconds on, every process that starts has another time: a day back, an hour or a year ahead."""
    by = chance.choice((-86_400, 3_600, 31_536_000))
    (stack.clock / "jump").write_text(f"{time.time() + 20 * chance.random()} {by}")


def set_clock(stack: Stack) -> None:
    (stack.clock / "jump").unlink()


def commit_elsewhere(stack: Stack, chance: random.Random) -> None:
    """Push a commit from another clone, so that the project's push is rejected."""
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "clone"
        stack.run("git", "clone", "--quiet", str(stack.origin), str(clone), cwd=stack.work)
        notes = clone / "NOTES.md"
        notes.write_text((notes.read_text() if notes.exists() else "") + "a colleague's note\n")
        who = ("-c", "user.name=a colleague", "-c", "user.email=colleague@example.org")
        stack.run("git", *who, "add", "--all", cwd=clone)
        stack.run("git", *who, "commit", "--quiet", "-m", "a note", cwd=clone)
        stack.run("git", "push", "--quiet", cwd=clone)


def merge(stack: Stack) -> None:
    """Merge what the colleague has pushed, as a person would; the next flow pushes the result."""
    stack.git("pull", "--quiet", "--no-rebase", "--no-edit", "origin", "main")


FAULTS: dict[str, Fault] = {
    "worker killed": Fault(during=kill_part("worker"), reported=("worker",)),
    "server killed": Fault(during=kill_part("server"), reported=("server",)),
    "database killed": Fault(during=kill_database),
    "machine killed": Fault(during=kill_machine),
    "disk full": Fault(
        before=fill_disk, repair=free_disk, reported=("disk is full", "no space left", "free some space")
    ),
    "bucket away": Fault(before=stop_bucket, repair=start_bucket, reported=("artifact", "dvc push", "MLflow")),
    "credential expired": Fault(before=expire_key, repair=renew_key, reported=("dvc push",)),
    "clock jumps": Fault(during=jump, repair=set_clock),
    "commit on the remote": Fault(before=commit_elsewhere, repair=merge, reported=("vlp-runs/main",)),
}
