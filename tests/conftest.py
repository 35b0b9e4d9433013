"""Shared fixtures: quiet tools, one thread, nothing written outside the test's temporary folder."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

from hypothesis import settings

settings.register_profile("here", deadline=None)  # a busy machine is no fault; pytest-timeout ends what hangs
settings.load_profile("here")
