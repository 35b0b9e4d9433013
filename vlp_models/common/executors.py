"""Executors: run a stage's chunks in this process, in a pool of processes, or on a cluster (flows/cluster.py).

A chunk is a module's function and plain data. It reads and writes files that all machines share; its output is either
complete or absent.
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

from vlp_models.common.log import configure_logging
from vlp_models.common.plugins import with_plugins
from vlp_models.errors import ParamsError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mapper(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in the order of `items`, and read only a few items ahead."""
        ...


class LocalMapper:
    """Runs chunks in this process, or in a pool of spawned ones: torch's threads do not survive a fork."""

    def __init__(self, workers: int = 1) -> None:
        """
        Raises:
            ParamsError: fewer than one worker.
        """
        if workers < 1:
            raise ParamsError(f"params.yaml: `cluster.workers: {workers}` must be at least 1")
        self.workers = workers

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self.workers == 1:
            yield from map(function, items)
            return
        function = with_plugins(function)
        with ProcessPoolExecutor(
            self.workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
        ) as pool:
            try:
                yield from bounded_results(lambda item: pool.submit(function, item), items, 2 * self.workers)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def bounded_results(submit: Callable[[Item], Any], items: Iterable[Item], limit: int) -> Iterator[Any]:
    """Yield the results of futures in order, with at most `limit` of them pending, so that memory stays constant."""
    pending: deque[Any] = deque()
    for item in items:
        pending.append(submit(item))
        if len(pending) >= limit:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def start_worker() -> None:
    """Initialize a worker process: configure logging, and exit when the parent dies instead of waiting forever."""
    configure_logging()
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
