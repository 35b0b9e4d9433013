"""Fixtures of the flows' tests: defined in flow_project.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from flow_project import make_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_project(tmp_path, monkeypatch)
