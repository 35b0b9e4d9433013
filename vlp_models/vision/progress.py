"""A progress bar on stderr: ETA, speed, one line of news. Quiet when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    def __init__(self, progress: Progress, description: str, total: int, unit: str) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, unit=unit, news="")

    def advance(self, news: str = "", by: int = 1) -> None:
        self._progress.update(self._task, advance=by, news=news)


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
