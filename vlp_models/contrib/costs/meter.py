"""Measure the process of a stage, and append the result to .work/costs.jsonl.

A stage that is killed (SIGKILL) leaves no line. Only this process and those that it has started and waited for are
measured: no other machine, no process that a launcher started, no GPU.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = Path(".work", "costs.jsonl")
POWERCAP = Path("/sys/class/powercap")  # RAPL: joules that the processors have used; readable by root on most systems
READ_EVERY = 60.0  # seconds; a counter of RAPL starts again after some minutes of full load
_counted: dict[str, float] = {}  # of this process, by earlier stages in it


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process of a stage has cost, or several together.

    started: Unix time. seconds: of the clock, without imports. cpu: seconds of all processors. memory: the most that
    one process used at a time. read, written: on disk, beyond the system's cache. All in bytes. joules: of the
    processors of the whole machine meanwhile, including what else ran; None: they cannot be read. completed: False for
    an attempt that failed or was interrupted.
    """

    stage: str
    started: float
    seconds: float
    cpu: float
    memory: float
    read: float = 0.0
    written: float = 0.0
    joules: float | None = None
    completed: bool = True

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def measure(root: Path, stage: str) -> Iterator[None]:
    """Measure the block, and what this process has done before it, such as its imports."""
    started, clock, energy, completed = time.time(), time.monotonic(), EnergyMeter(), False
    try:
        yield
        completed = True
    finally:
        usage = _usage()
        used = {name: value - _counted.get(name, 0.0) for name, value in usage.items()}
        _counted.update(usage)
        cost = Cost(
            stage=stage,
            started=started,
            seconds=time.monotonic() - clock,
            memory=1024 * max(_peak(resource.RUSAGE_SELF), _peak(resource.RUSAGE_CHILDREN)),
            joules=energy.stop(),
            completed=completed,
            **used,
        )
        with suppress(OSError):  # a full disk, for example
            (root / FILE).parent.mkdir(exist_ok=True)
            with (root / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(cost.to_plain()) + "\n")


def _usage() -> dict[str, float]:
    """Return this process's processor time and bytes on disk, with those of its ended children."""
    usage = {"cpu": sum(os.times()[:4])}
    with suppress(OSError, ValueError, KeyError):  # no /proc
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        io = {name: float(value) for name, _, value in (line.partition(": ") for line in lines)}
        usage |= {"read": io["read_bytes"], "written": io["write_bytes"]}
    return usage


def _peak(whose: int) -> int:
    """Return the largest resident memory of one process, in KiB."""
    return resource.getrusage(whose).ru_maxrss


class EnergyMeter:
    """Adds up the energy of all processor packages from now on, read once a minute by a thread."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._folder = folder
        self._last = read_energy(folder)
        self._joules = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._last:
            self._thread.start()

    def stop(self) -> float | None:
        """Return the joules; None if they cannot be read."""
        self._stopped.set()
        if not self._last:
            return None
        self._thread.join()
        self.read()
        return self._joules

    def _run(self) -> None:
        while not self._stopped.wait(READ_EVERY):
            self.read()

    def read(self) -> None:
        """Add what was used since the last reading: at most one round of a counter."""
        now = read_energy(self._folder)
        if now.keys() == self._last.keys():
            for name, (counter, size) in now.items():
                self._joules += (counter - self._last[name][0]) % (size + 1) / 1e6
            self._last = now


def read_energy(folder: Path = POWERCAP) -> dict[str, tuple[int, int]]:
    """Return processor package -> its energy counter and the counter's range, in microjoules; empty if unreadable.

    The counters of a package's parts, and of the whole platform, count the same energy again.
    """
    counters = {}
    with suppress(OSError, ValueError):
        for zone in sorted(folder.glob("intel-rapl:*")):
            if (zone / "name").read_text().startswith("package-"):
                counter, size = ((zone / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                counters[zone.name] = (int(counter), int(size))
        return counters
    return {}
