"""The peak memory of a call in this process, for tests of code whose memory must not grow with the data."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pyarrow as pa

POOLS: list[pa.MemoryPool] = []  # a pool must outlive what is in it


def peak_mb(call: Callable[[], None]) -> float:
    """Return the peak of Python objects and Arrow's buffers, in MB. DuckDB has its own limit."""
    before, arrow = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    POOLS.append(arrow)
    pa.set_memory_pool(arrow)
    tracemalloc.start()
    try:
        call()
        return (tracemalloc.get_traced_memory()[1] + arrow.max_memory()) / 2**20
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
