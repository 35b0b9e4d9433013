"""A progress bar on stderr: ETA, speed, one line of news. Not on a terminal: a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 20.0  # seconds, where there is no terminal


class Bar:
    def __init__(self, progress: Progress, description: str, total: int, unit: str) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, unit=unit, news="")
        self._what, self._total, self._unit = description, total, unit
        self._done, self._shown = 0, time.monotonic()

    def advance(self, news: str = "", by: int = 1) -> None:
        self._progress.update(self._task, advance=by, news=news)
        self._done += by
        if self._progress.disable and time.monotonic() - self._shown >= LINE_EVERY:
            self._shown = time.monotonic()
            print(
                f"{self._what}  {self._done}/{self._total} {self._unit}  {news}".rstrip(), file=sys.stderr, flush=True
            )


@contextmanager
def progress_bar(description: str, total: int, unit: str) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield Bar(progress, description, total, unit)
