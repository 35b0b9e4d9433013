"""Who does the parts of a stage: this process, processes of this machine, or a cluster that a flow has brought along.

A part is a module's function and plain data; it reads and writes files that all machines share, and is whole or absent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from vlp_models.errors import ParamsError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mapper(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The results, in the order of `items`, of which only some are taken ahead."""
        ...


class LocalMapper:
    """`workers` processes, or this one alone. Started afresh, not forked: torch and its threads survive no fork."""

    def __init__(self, workers: int = 1) -> None:
        """
        Raises:
            ParamsError: fewer than one.
        """
        if workers < 1:
            raise ParamsError(f"params.yaml: `cluster.workers: {workers}` must be at least 1")
        self.workers = workers

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self.workers == 1:
            yield from map(function, items)
            return
        with ProcessPoolExecutor(
            self.workers, mp_context=multiprocessing.get_context("spawn"), initializer=die_with_parent
        ) as pool:
            try:
                yield from in_flight(lambda item: pool.submit(function, item), items, 2 * self.workers)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def in_flight(submit: Callable[[Item], Any], items: Iterable[Item], limit: int) -> Iterator[Any]:
    """The results, in order, of futures of which at most `limit` are under way: memory does not grow with `items`."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= limit:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def cpus(most: int = 0) -> int:
    """How many processors this process may use, at most `most` where that is given."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, most) if most else found


def die_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, and keep writing what it has."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
