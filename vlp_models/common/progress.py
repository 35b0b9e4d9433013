"""Progress of long work on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Where stderr is not a terminal: seconds until the first line. The wait doubles with each line, up to the longest one.
FIRST_LINE, LONGEST_WAIT = 60.0, 600.0
ANNOUNCE_AFTER, ANNOUNCE_AGAIN = 1.0, 20.0  # seconds of silence before `announced` prints, and between its lines


class ProgressBar:
    """One task's progress; made by `progress_bar`."""

    def __init__(self, progress: Progress, description: str, total: int, unit: str, completed: int) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, completed=completed, unit=unit, note="")
        self._description, self._total, self._unit = description, total, unit
        self._first = self._completed = completed
        self._started = self._updated = time.monotonic()
        self._wait = FIRST_LINE

    def is_due(self, refresh: float) -> bool:
        """Return whether the display is due for an update; on a terminal it is every `refresh` seconds."""
        # `disable` is set where stderr is not a terminal.
        wait = self._wait if self._progress.disable else refresh
        return time.monotonic() - self._updated >= wait

    def advance(self, note: str = "", by: int = 1) -> None:
        """Count `by` more units as completed; `note` is shown behind them."""
        self.update(self._completed + by, note)

    def update(self, completed: int, note: str = "", force: bool = False) -> None:
        """Set the completed units; `note` is shown behind them.

        Args:
            force: where stderr is not a terminal, print a line even if the last one is recent.
        """
        self._completed = completed
        self._progress.update(self._task, completed=completed, note=note)
        if not self._progress.disable:
            self._updated = time.monotonic()
        elif force or self.is_due(0.0):
            self._print_line(note)

    def _print_line(self, note: str) -> None:
        """Print the state as one plain line; the next one is due after twice the time."""
        self._updated, self._wait = time.monotonic(), min(2 * self._wait, LONGEST_WAIT)
        # An earlier run's units took none of this run's time.
        seconds = self._updated - self._started
        remaining = (self._total - self._completed) * seconds / max(1, self._completed - self._first)
        count = f"{self._description}  {self._completed:,}/{self._total:,} {self._unit}"
        parts = [count, note, f"{clock(remaining)} left"]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def progress_bar(description: str, total: int, unit: str, completed: int = 0) -> Iterator[ProgressBar]:
    """Show progress of `total` units of work while the block runs.

    Args:
        unit: plural name of the things counted, e.g. "images".
        completed: units that an earlier run finished; they do not count for the speed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not on_terminal()) as progress:
        yield ProgressBar(progress, description, total, unit, completed)


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Say on a terminal what a block does that takes longer than a second, then every 20 seconds how long it has taken.

    Prints to stderr; nothing where that is not a terminal.
    """
    if not on_terminal():
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        wait, elapsed = ANNOUNCE_AFTER, ""
        while not done.wait(wait):
            print(f"{text} ...{elapsed}", file=sys.stderr, flush=True)
            # The first line comes after a second, and without a duration.
            wait = ANNOUNCE_AGAIN
            # The next line is printed `wait` seconds from now, so the duration is the one at that time.
            elapsed = f" {clock(time.monotonic() - start + wait)}"

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # Without it, a line could appear after what the caller prints next.
        thread.join()


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
