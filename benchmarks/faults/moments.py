"""When a fault is injected: the moments of a stage, observed from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from ground import TRAININGS, Command, Ground

MOMENTS = ("begin", "load", "train", "write", "record")
STEP_FILES = "step-????????.ckpt"


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    stage: str
    moment: str
    command: str
    at_once: bool  # whether the rerun starts without waiting for processes of the first run
    chance: float  # where in the moment, how many bytes, ...


@dataclass
class Outcome:
    fault: Fault
    hit: bool = True  # False: the run had ended before the fault
    exit_code: int = 0
    reruns: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""  # the last lines of the disturbed run
    note: str = ""  # what exactly was damaged
    may_repeat: set[str] = field(default_factory=set)  # recorded stages that may rightly run again

    @property
    def record(self) -> dict[str, Any]:
        own = {k: v for k, v in asdict(self).items() if k not in ("fault", "may_repeat")}
        return {**asdict(self.fault), **own}


def reach(ground: Ground, fault: Fault, run: Command) -> bool:
    """Wait for the fault's moment; return False if the run ends before it."""
    present = until(lambda: stage_runs(ground, fault.stage), run)
    if not present:
        return False
    if fault.moment == "begin":
        time.sleep(0.3 * fault.chance)
    elif fault.moment == "load":
        time.sleep(0.3 + 6 * fault.chance if fault.stage in TRAININGS else 3 * fault.chance)
    elif fault.moment == "train":
        step = 4 * (1 + int(fault.chance * 5))
        work = ground.project / ".work" / fault.stage.replace("@", "-")
        if not until(lambda: any(int(p.name[5:13]) >= step for p in work.glob(f"*/{STEP_FILES}")), run):
            return False
    elif fault.moment == "write":
        outs = [ground.project / out["path"] for out in ground.lock(ground.snapshot)[fault.stage]["outs"]]
        names = [p for out in outs for p in (out, out.with_name(f".{out.name}.partial"))]
        if not until(lambda: any(name.exists() for name in names), run):
            return False
        time.sleep(0.1 * fault.chance)
    elif fault.moment == "record":
        if not until(lambda: not stage_runs(ground, fault.stage), run):
            return False
        time.sleep(0.3 * fault.chance)
    return run.process.poll() is None


def stage_runs(ground: Ground, stage: str) -> bool:
    process = ground.process("stage")
    if process is None:
        return False
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "@".join(words[words.index("stage") + 1 :]) == stage
    return False


def until(met: Callable[[], bool], run: Command, seconds: float = 600) -> bool:
    """Wait for a condition; return False if the run or the time ends before."""
    deadline = time.monotonic() + seconds
    while not met():
        if run.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
