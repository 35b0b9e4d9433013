"""When a fault is injected: the moments of a stage, observed from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import yaml
from ground import EVERY, TRAININGS, Command, Ground

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
    whole: bool = True  # whether the rest of the pipeline follows; otherwise only the stage and what it needs


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
    verdict: str = "survived"
    noticed: float = 0.0  # seconds from the death of a part to the end of the command
    reference: bytes = b""  # the weights to expect; empty: the undisturbed run's
    restored: bool = False  # whether the rerun must restore the finished result
    clean_up: Callable[[], None] = lambda: None
    may_repeat: set[str] = field(default_factory=set)  # recorded stages that may rightly run again

    def blame(self, verdict: str, *problems: str) -> None:
        """Record problems; the first verdict stays.

        Args:
            verdict: `silent`: it ended with wrong content, or without a message that names the cause; `lost`: work was
                repeated, data is gone, processes or files are left; `endless`: it did not end in time.
        """
        if problems and not self.problems:
            self.verdict = verdict
        self.problems += problems

    @property
    def record(self) -> dict[str, Any]:
        fields = {
            k: v
            for k, v in asdict(self).items()
            if k not in ("fault", "may_repeat", "clean_up", "reference", "restored")
        }
        return {**asdict(self.fault), **fields}


def start(ground: Ground, fault: Fault, command: str = "", **options: Any) -> Command:
    """Start the fault's command, or another one that takes stages."""
    return Command(command or fault.command, ground.project, more=() if fault.whole else [fault.stage], **options)


def expect_message(outcome: Outcome, run: Command, *causes: str) -> None:
    """Check that a run that ended with an error names one of the causes, without a traceback."""
    if not outcome.exit_code:
        return
    if "Traceback (most recent call last)" in run.output:
        outcome.blame("silent", f"it ended with {outcome.exit_code} and a traceback")
    elif not any(cause in run.output.lower() for cause in causes):
        outcome.blame("silent", f"it ended with {outcome.exit_code}, and the message has none of {', '.join(causes)}")


def set_params(ground: Ground, values: dict[str, Any]) -> Callable[[], None]:
    """Set params by dotted key, and return what restores the file."""
    file = ground.project / "params.yaml"
    before = file.read_bytes()
    params = yaml.safe_load(before)
    for dotted, value in values.items():
        *sections, key = dotted.split(".")
        section = params
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    file.write_text(yaml.safe_dump(params, sort_keys=False))

    def restore() -> None:
        file.write_bytes(before)

    return restore


def reach(ground: Ground, fault: Fault, run: Command | None) -> bool:
    """Wait for the fault's moment; return False if the run ends before it.

    Args:
        run: None: a run that another process started.
    """
    present = until(lambda: stage_runs(ground, fault.stage), run)
    if not present:
        return False
    if fault.moment == "begin":
        time.sleep(0.3 * fault.chance)
    elif fault.moment == "load":
        time.sleep(0.3 + 6 * fault.chance if fault.stage in TRAININGS else 3 * fault.chance)
    elif fault.moment == "train":
        step = EVERY * (1 + int(fault.chance * 5))
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
    return run is None or run.process.poll() is None


def stage_runs(ground: Ground, stage: str) -> bool:
    process = ground.process("stage")
    if process is None:
        return False
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "@".join(words[words.index("stage") + 1 :]) == stage
    return False


def until(met: Callable[[], object], run: Command | None, seconds: float = 400, pause: float = 0.02) -> bool:
    """Wait for a condition; return False if the run or the time ends before."""
    deadline = time.monotonic() + seconds
    while not met():
        if (run is not None and run.process.poll() is not None) or time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
