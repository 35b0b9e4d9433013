"""Executors: run a stage's chunks in this process, in a pool of processes, or on a cluster (pipeline/engines.py).

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
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vlp_models.common.log import configure_logging
from vlp_models.common.plugins import with_plugins
from vlp_models.errors import ProcessLostError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mapper(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in the order of `items`, and read only a few items ahead."""
        ...


class LocalMapper:
    """Runs chunks in this process, or in a pool of spawned ones: torch's threads do not survive a fork."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self.workers == 1:
            yield from map(function, items)
            return
        # Children from before belong to other code, so a stop must not terminate them.
        function, earlier = with_plugins(function), set(multiprocessing.active_children())
        with ProcessPoolExecutor(
            self.workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
        ) as pool:
            try:
                yield from bounded_results(lambda item: pool.submit(function, item), items, 2 * self.workers)
            except BrokenProcessPool:
                raise ProcessLostError(
                    "a process that worked on chunks was lost; the system kills one if memory runs out: free some, or "
                    "set `cluster.workers` to fewer. Finished chunks are kept: the same command continues"
                ) from None
            except Exception:
                # A chunk failed: drop those that have not started, and let the running ones finish.
                pool.shutdown(cancel_futures=True)
                raise
            except BaseException:  # stopped: no one waits for chunks, which are complete or absent
                for worker in set(multiprocessing.active_children()) - earlier:
                    worker.terminate()
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


def list_chunks(directory: Path, total: int, name: Callable[[int], str]) -> set[int]:
    """Return the numbers, below `total`, of the chunks in a folder, which is listed once.

    Args:
        name: returns the file or folder of a chunk, in whose name the number has eight digits or more.
    """
    # The eight zeros in the name of chunk 0 are where the number is: `chunk-00000000.npy` -> `chunk-`, `.npy`.
    prefix, _, suffix = name(0).partition("0" * 8)
    chunks = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            number = entry.name.removeprefix(prefix).removesuffix(suffix)
            # The comparison of the whole name excludes temporary files, whose names lack the prefix or the suffix.
            if number.isdecimal() and int(number) < total and entry.name == f"{prefix}{number}{suffix}":
                chunks.add(int(number))
    return chunks


def start_worker() -> None:
    """Initialize a worker process: configure logging, and exit when the parent dies instead of waiting forever."""
    configure_logging()
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        # The sentinel becomes ready when the parent ends, also by SIGKILL, which runs no clean-up in it.
        wait([parent.sentinel])
        # Not sys.exit, which would end this thread only.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
