"""Measure the process of a stage, and append the result to .work/costs.jsonl.

A stage that is killed (SIGKILL) leaves no line; its next attempt has its own. Processes on other machines are not
measured, nor are GPUs.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlp_models.contrib.costs.costs import FILE, Cost

POWERCAP = Path("/sys/class/powercap")  # RAPL: joules that the processors have used; readable by root on most systems
_counted: dict[str, float] = {}  # of this process, by earlier stages in it


@contextmanager
def measure(root: Path, stage: str) -> Iterator[None]:
    """Measure the block, and what this process has done before it, such as its imports."""
    started, clock, energy = time.time(), time.monotonic(), read_energy()
    try:
        yield
    finally:
        usage = _usage()
        used = {name: value - _counted.get(name, 0.0) for name, value in usage.items()}
        _counted.update(usage)
        cost = Cost(
            stage=stage,
            started=started,
            seconds=time.monotonic() - clock,
            memory=1024 * max(_peak(resource.RUSAGE_SELF), _peak(resource.RUSAGE_CHILDREN)),
            joules=joules_between(energy, read_energy()),
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


def read_energy(folder: Path = POWERCAP) -> dict[str, tuple[int, int]]:
    """Return processor package -> its energy counter and the counter's range, in microjoules; empty if unreadable.

    A package's name is `intel-rapl:0`; parts of it, such as `intel-rapl:0:0`, are in its counter.
    """
    counters = {}
    with suppress(OSError, ValueError):
        for package in sorted(folder.glob("intel-rapl:[0-9]*")):
            if package.name.count(":") == 1:
                counter, size = ((package / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                counters[package.name] = (int(counter), int(size))
        return counters
    return {}


def joules_between(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float | None:
    """Return the energy of all packages between two readings; None if the processor does not tell.

    A counter that has passed its range starts again at zero.
    """
    if not before or before.keys() != after.keys():
        return None
    differences = [(after[name][0] - count) % (size + 1) for name, (count, size) in before.items()]
    return sum(differences) / 1e6
