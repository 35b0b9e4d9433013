"""Shared fixtures: quiet tools, one thread, nothing written outside the test's temporary folder."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

import pytest
from hypothesis import settings

from vlp_models.common.log import configure_logging

settings.register_profile("here", deadline=None)  # a busy machine is no fault; pytest-timeout ends what hangs
settings.load_profile("here")
configure_logging()  # as every command does; tests read messages with capsys


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, lest one process be left with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("pipeline")}
    items.sort(key=lambda item: item.path not in slow)
