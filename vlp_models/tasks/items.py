"""Scores item by item, read back: whatever statistic a task has of its own is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vlp_models.metrics.items import STATISTICS, ItemScores
from vlp_models.metrics.items import read_items as read
from vlp_models.metrics.score import Statistic
from vlp_models.tasks import TASKS, task_class


class _OfAllTasks(Mapping[str, Statistic]):
    """The common statistics; the tasks' own are looked for only where a name is none of these."""

    def __getitem__(self, name: str) -> Statistic:
        if name in STATISTICS:
            return STATISTICS[name]
        for task in TASKS:
            if name in (own := task_class(task).statistics):
                return own[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(STATISTICS)

    def __len__(self) -> int:
        return len(STATISTICS)


def read_items(path: Path) -> list[ItemScores]:
    """
    Raises:
        DataError: no such file, or not one of ours.
    """
    return read(path, _OfAllTasks())
