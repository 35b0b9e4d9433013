"""Fixtures of small shards."""

from small_shards import build_shards, record, regions  # noqa: F401
